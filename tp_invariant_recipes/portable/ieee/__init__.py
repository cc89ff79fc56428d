"""Functions and layers in stated IEEE arithmetic."""
