"""The invariant engine: sums that cross the tensor-parallel dimension, in one order for every degree."""
