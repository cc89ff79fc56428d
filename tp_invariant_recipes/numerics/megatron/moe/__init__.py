"""Megatron's mixture of experts: the layer and its router."""
