"""The invariant engine: sums across the tensor-parallel dimension in the same order for every degree."""
