"""Compare two ledgers, logs or lists of norms, and put the result into words. Imports neither torch nor Megatron."""
