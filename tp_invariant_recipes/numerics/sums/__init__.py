"""Sums whose order is fixed: over virtual, data and context shards, buckets, and the gradient norm."""
