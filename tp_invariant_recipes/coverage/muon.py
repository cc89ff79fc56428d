"""The limits of Muon, which orthogonalises whole matrices (numerics/megatron/muon.py)."""

from collections.abc import Callable, Mapping
from typing import Any

from tp_invariant_recipes.coverage.limit import Limit
from tp_invariant_recipes.settings import peft
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
    model = config.model
    ranks = config.parallel.data_parallel_size * model["context_parallel_size"]
    copies = model["tensor_model_parallel_size"] > model["expert_model_parallel_size"]
    return bool(model.get("num_moe_experts")) and ranks == 1 and copies


Wrong = Callable[[Mapping[str, Any]], bool]  # of a section `optimizer`


def _unread(name: str) -> Wrong:
    return lambda fields: not computes(fields) and fields.get(name, READ[name]) != READ[name]


def _of_run(wrong: Wrong, why: str) -> Limit:
    return Limit(lambda t: wrong(t.section("optimizer")), why)


# Whether an optimizer is beyond what is covered, and why.
RULES: tuple[tuple[Wrong, str], ...] = (
    (
        lambda fields: computes(fields) and fields.get(TP_MODE, READ[TP_MODE]) != WHOLE,
        f"Muon would orthogonalise the part of a matrix that a rank has; optimizer.{TP_MODE}={WHOLE}",
    ),
    *((_unread(name), f"optimizer.{name}: only Muon reads it; leave it unset") for name in READ),
)

LIMITS = (
    *(_of_run(*rule) for rule in RULES),
    Limit(
        lambda t: is_layer_wise(t.section("optimizer")) and owns_copies(t),
        f"without data-parallel ranks Megatron-Core saves each copy of an expert as the only one; "
        f"optimizer.{LAYER_WISE}=false",
    ),
    Limit(
        lambda t: computes(t.section("optimizer")) and peft.adapts(t),
        "adapters have not been trained with Muon; optimizer.optimizer=adam",
    ),
)
