"""The modes of numerics, one value a file; numerics/mode.py says what a mode is."""
