"""Fixes to installed packages where they offer no seam. `registry.py` holds the table."""
