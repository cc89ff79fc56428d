# SPDX-License-Identifier: Apache-2.0
"""Products of matrices: definitions, tiles, and the formats of their operands."""
