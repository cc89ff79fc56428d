# SPDX-License-Identifier: Apache-2.0
"""The invariant engine: sums across the tensor-parallel dimension in the same order for every degree."""
