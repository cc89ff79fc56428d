# SPDX-License-Identifier: Apache-2.0
"""tpi audit: is a layout wrong, or only rounded otherwise?"""
