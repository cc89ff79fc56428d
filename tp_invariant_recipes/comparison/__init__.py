"""Compares ledgers and recordings, and explains the first difference. Imports neither torch nor Megatron."""
