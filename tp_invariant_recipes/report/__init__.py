"""One page about runs: what their ledgers hold, drawn and written for people. Imports neither torch nor Megatron."""
