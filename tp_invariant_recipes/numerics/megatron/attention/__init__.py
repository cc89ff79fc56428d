# SPDX-License-Identifier: Apache-2.0
"""Megatron's attentions: core, latent, packed rows, context parallelism."""
