# SPDX-License-Identifier: Apache-2.0
"""How much memory a run needs, part by part."""
