"""Experts: their placement, the exchange of tokens, their GEMMs in each precision."""
