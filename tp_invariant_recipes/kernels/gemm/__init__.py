"""Products of matrices: definitions, tiles, and the formats of their operands."""
