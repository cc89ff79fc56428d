# SPDX-License-Identifier: Apache-2.0
"""Muon in a section `optimizer`: names, defaults and what follows from them (numerics/megatron/muon.py computes it)."""

from collections.abc import Mapping
from typing import Any

from tp_invariant_recipes.settings.run_config import RunConfig

MUON, OLD_NAME = "muon", "dist_muon"  # Megatron-Core still knows the old one, of the layer-wise optimizer
LAYER_WISE = "use_layer_wise_distributed_optimizer"
TP_MODE, WHOLE = "muon_tp_mode", "duplicated"
# Fields that only Muon reads, with Megatron-Core's defaults.
READ = {
    "muon_momentum": 0.95,
    "muon_nesterov": False,
    "muon_split_qkv": True,
    "muon_scale_mode": "spectral",
    "muon_fp32_matmul_prec": "medium",
    "muon_coefficient_type": "quintic",
    "muon_num_ns_steps": 5,
    "muon_tp_mode": "blockwise",
    "muon_extra_scale_factor": 1.0,
    LAYER_WISE: False,
}


def computes(optimizer: Mapping[str, Any]) -> bool:
    """Whether a section `optimizer` is one of Muon."""
    return optimizer.get("optimizer") in (MUON, OLD_NAME)


def is_layer_wise(optimizer: Mapping[str, Any]) -> bool:
    """Whether each data-parallel rank updates some of the matrices, whole."""
    return bool(optimizer.get(LAYER_WISE)) or optimizer.get("optimizer") == OLD_NAME


def owns_copies(config: RunConfig) -> bool:
    """Whether ranks have copies of experts and no data-parallel group, the case that Megatron-Core cannot save."""
    ranks = config.parallel.data_parallel_size * config.layout.cp
    copies = config.layout.tp > config.layout.ep
    return bool(config.shape.experts) and ranks == 1 and copies
