"""Fixes to installed packages where they offer no seam (docs/patches.md). `registry.py` holds the table."""
