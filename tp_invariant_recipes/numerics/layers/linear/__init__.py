"""Linear layers: column- and row-parallel products in each precision."""
