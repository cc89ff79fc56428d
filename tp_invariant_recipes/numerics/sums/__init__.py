# SPDX-License-Identifier: Apache-2.0
"""Sums whose order is fixed: over virtual, data and context shards, buckets, and the gradient norm."""
