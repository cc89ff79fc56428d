# SPDX-License-Identifier: Apache-2.0
"""The public functions of `tp_invariant_recipes` (docs/api.md). The commands call the same functions."""
