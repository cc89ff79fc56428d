"""Experts: their placement, the exchange of tokens, their products in each precision."""
