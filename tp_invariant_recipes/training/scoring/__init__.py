"""Ranks of `tpi score`: a forward pass whose log-probabilities depend on weights and tokens alone."""
