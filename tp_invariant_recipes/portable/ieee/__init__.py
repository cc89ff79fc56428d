# SPDX-License-Identifier: Apache-2.0
"""Functions and layers in stated IEEE arithmetic."""
