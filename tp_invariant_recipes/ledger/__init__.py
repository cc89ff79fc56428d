"""What a run records as it trains, and how two runs are compared. Imports neither torch nor Megatron."""
