# SPDX-License-Identifier: Apache-2.0
"""Fixes to installed packages that offer no hook (docs/patches.md). `registry.py` holds the table."""
