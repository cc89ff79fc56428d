"""How two ledgers, logs or lists of norms are compared, and worded. Imports neither torch nor Megatron."""
