# SPDX-License-Identifier: Apache-2.0
"""Invariant layers in the places of those of Megatron-Core and Transformer Engine: all that touches their names."""
