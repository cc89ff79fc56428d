"""Transformer Engine: Megatron-Core's wrappers of it, and its own modules."""
