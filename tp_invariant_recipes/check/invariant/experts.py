"""The limits of the invariant experts, for models with experts."""

from functools import partial

from tp_invariant_recipes.check.invariant.limit import has, lacks, limit_of, name_of, naming, uncaptured, uncut
from tp_invariant_recipes.cpu_host.vectors import VECTORS
from tp_invariant_recipes.fields.model import EXPERTS_HOW, EXPERTS_OFF
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.layers.experts import expert_placement
from tp_invariant_recipes.numerics.megatron.spec import layers_alike
from tp_invariant_recipes.settings import cuda_graphs, low_precision, sft
from tp_invariant_recipes.settings.run_config import RunConfig

LATENT = "moe_latent_size"  # experts see so many features, projected from the hidden size

Z_LOSS = "moe_z_loss_coeff"
GLOBAL = "global_aux_loss"  # of a data shard's sequences so far
BALANCING = ("aux_loss", "seq_aux_loss", GLOBAL, "none")

_row = partial(limit_of, has("num_moe_experts"))
_of_latents = partial(limit_of, lambda t: t.shape.experts and t.model.get(LATENT))


def _owned(config: RunConfig) -> bool:
    return expert_placement.fits(config.shape.experts, config.layout.tp, config.layout.ep)


def routed(config: RunConfig, shards: int) -> int:
    """Return the number of router logits for a virtual shard of one context shard, or 0 if C is not valid."""
    contexts = config.numerics.context_shards or 1
    if not (isinstance(contexts, int) and contexts > 0):
        return 0
    return config.shape.sequence // (shards * contexts) * config.shape.experts


def mixed(config: RunConfig) -> bool:
    """Whether some layers of a model with experts are dense."""
    return bool(config.shape.experts) and not layers_alike(config.shape.expert_layers)


def _of_experts(config: RunConfig) -> str | None:
    """Return the activation's name in numerics/layers/experts/experts.py."""
    kinds = {("silu", True): "swiglu", ("quick_gelu", True): "swiglu", ("squared_relu", False): "squared_relu"}
    return kinds.get((name_of(config.model.get("activation_func")), config.shape.gated))


# Settings that a model with experts must not have, and the reason.
LIMITS = (
    _row(lacks(mode.EXPERTS), mode.only(mode.EXPERTS)),
    _row(
        lambda t: t.layout.etp > 1,
        "experts split over ranks have no invariant version",
        "etp=1",
    ),
    _row(
        lambda t: not _owned(t),
        "each expert needs one rank that computes it: of tp and ep one must divide the other, and both "
        "model.num_moe_experts",
    ),
    _row(
        lambda t: t.device.kind == "cpu" and t.shape.expert_width % VECTORS,
        f"on a CPU model.moe_ffn_hidden_size must be a multiple of {VECTORS}",
    ),
    _of_latents(*uncut("experts of latents have")),
    _of_latents(has("add_bias_linear"), "experts of latents are covered without biases", "model.add_bias_linear=false"),
    _of_latents(*uncaptured("experts of latents have")),
    _of_latents(low_precision.enabled, "experts of latents have no invariant version in FP8", "precision=bf16"),
    naming(
        "model.activation_func",
        _row(
            lambda t: _of_experts(t) is None,
            "of the experts' activations only SwiGLU, quick GELU with a gate and squared ReLU are covered",
            "model.activation_func=torch.nn.functional.silu",
        ),
    ),
    naming(
        "model.moe_router_load_balancing_type",
        _row(
            lambda t: t.model.get("moe_router_load_balancing_type", "aux_loss") not in BALANCING,
            "that loss of the router has no invariant version",
            f"model.moe_router_load_balancing_type one of {', '.join(BALANCING)}",
        ),
    ),
    _row(
        lambda t: t.model.get("moe_router_load_balancing_type") == GLOBAL and sft.packing(t) is not None,
        f"the sequences of a packed row come in another order than {GLOBAL} counts them",
        "model.moe_router_load_balancing_type=seq_aux_loss",
    ),
    _row(
        lambda t: t.model.get("moe_router_load_balancing_type") == GLOBAL and cuda_graphs.requested(t.model),
        f"{GLOBAL} counts sequences where a captured layer cannot",
        "cuda_graph=off",
    ),
    _row(
        lambda t: t.model.get("moe_router_dtype") not in (None, "fp32"),
        "only model.moe_router_dtype=fp32 or null is covered",
    ),
    _row(
        lambda t: t.model.get("moe_token_dispatcher_type", "allgather") == "flex",
        "the flex dispatcher has no invariant version",
        "model.moe_token_dispatcher_type=alltoall",
    ),
    _row(
        lambda t: t.model.get(Z_LOSS) and t.model.get("mtp_use_repeated_layer"),
        "one layer for all depths of multi-token prediction has no z-loss",
        f"model.{Z_LOSS}=null",
    ),
    *(
        _row(
            has(field),
            f"model.{field} is not covered",
            f"{f'model.{field}=false' if field in EXPERTS_HOW else 'leave it unset'}",
        )
        for field in EXPERTS_OFF
    ),
)
