"""Megatron's attentions: core, latent, packed rows, context parallelism."""
