"""Compares ledgers, logs or lists of norms, and explains the first difference. Imports neither torch nor Megatron."""
