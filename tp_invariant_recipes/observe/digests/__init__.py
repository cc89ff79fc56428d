# SPDX-License-Identifier: Apache-2.0
"""Digests of gradients and of what the optimizer holds: the callback, the merge over ranks, the sums."""
