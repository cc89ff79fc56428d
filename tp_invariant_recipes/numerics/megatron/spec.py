"""The invariant layer for each stock layer: a block specification for Bridge's provider, and replacements elsewhere."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.host import torch_adam
from tp_invariant_recipes.host.versions import installed
from tp_invariant_recipes.replacement import Replacement

# Class in a stock specification -> its invariant replacement, as MODULE:CLASS of this package.
SUBSTITUTES = {
    "ColumnParallelLinear": "megatron.local:InvariantColumnParallelLinear",
    "RowParallelLinear": "megatron.local:InvariantRowParallelLinear",
    "WrappedTorchNorm": "megatron.local:InvariantRMSNorm",
    "MambaMixer": "megatron.mamba:InvariantMambaMixer",
    "TEColumnParallelLinear": "megatron.te:InvariantTEColumnParallelLinear",
    "TELayerNormColumnParallelLinear": "megatron.te:InvariantTELayerNormColumnParallelLinear",
    "TERowParallelLinear": "megatron.te:InvariantTERowParallelLinear",
    "TENorm": "megatron.te:InvariantTERMSNorm",
    "_TENormWithResidual": "megatron.te:InvariantTERMSNorm",
    "MoELayer": "megatron.moe_layer:InvariantMoELayer",
    "TopKRouter": "megatron.router:InvariantTopKRouter",
    "SequentialMLP": "megatron.moe_layer:InvariantSequentialMLP",
    "TEGroupedMLP": "megatron.te:InvariantTEGroupedMLP",
    "DotProductAttention": "megatron.local:InvariantDotProductAttention",
    "TEDotProductAttention": "megatron.te:InvariantTEDotProductAttention",
    "LatentAttention": "megatron.latent_attention:InvariantLatentAttention",
    "LatentDotProductAttention": "megatron.latent_attention:InvariantLatentDotProductAttention",
    "DuplicatedLinear": "megatron.latent_attention:InvariantDuplicatedLinear",
    "TELinear": "megatron.te:InvariantTEDuplicatedLinear",
}
# The same for norms of queries or keys, which the specification's field tells apart.
HEAD_NORMS = {"WrappedTorchNorm": "megatron.local:InvariantHeadNorm", "TENorm": "megatron.te:InvariantTEHeadNorm"}
HEAD_NORM_FIELDS = ("q_layernorm", "k_layernorm")
# Classes that sum nothing across ranks themselves.
AS_THEY_ARE = (
    "TransformerLayer",
    "SelfAttention",
    "MLP",
    "HybridStack",
    "MambaLayer",
    "MLPLayer",
    "MoETransformerLayer",
    "TEActivationOp",
    "TEColumnParallelGroupedLinear",
    "TERowParallelGroupedLinear",
    "IdentityOp",
    "IdentityFuncOp",
)
# The same where numerics=portable has a layer of its own.
PORTABLE = {
    "DotProductAttention": "portable.layers:PortableDotProductAttention",
    "TopKRouter": "portable.experts:PortableTopKRouter",
    "SequentialMLP": "portable.experts:PortableSequentialMLP",
}
# Classes that read the weights of modules below them, which then never run.
READ_BELOW = ("SequentialMLP", "TEGroupedMLP", "MambaMixer", "ParallelLinearAdapter")
# numerics.grad_norm -> the replacement of Megatron's get_grad_norm_fp32.
NORMS = {"exact": "sums.grad_norm:get_grad_norm_fp32", "fp64": "sums.grad_norm:fp64_grad_norm"}
_NORM_WHY = "a sum of squares depends on how parameters are sharded"


def invariant_layer_spec(config, vp_stage: int | None = None):
    """Bridge's transformer block with invariant layers. For `model.transformer_layer_spec`."""
    from megatron.bridge.models import gpt_provider
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    local = config.transformer_impl == "local"
    stock = gpt_provider.local_layer_spec if local else gpt_provider.transformer_engine_layer_spec
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    final_norm = _named(SUBSTITUTES["WrappedTorchNorm" if local else "TENorm"])
    own = PORTABLE if config.invariant_mode == "portable" else {}
    return TransformerBlockSubmodules(layer_specs=[invariant(stock(config), own=own)] * layers, layer_norm=final_norm)


def invariant(part: Any, field: str = "", own: Mapping[str, str] = MappingProxyType({})) -> Any:
    """A part of a specification with every layer replaced by its invariant class.

    part:  a ModuleSpec, a dataclass of submodules, a partial that takes submodules, a list of these, a class, a
           function or None.
    field: the field of the specification that holds the part.
    own:   substitutes that stand before those of the tables.
    Raises ConfigError for a class in none of the tables, since it may sum across ranks.
    """
    if isinstance(part, type):
        table = {**(HEAD_NORMS if field in HEAD_NORM_FIELDS else SUBSTITUTES), **own}
        if part.__name__ in table:
            return _named(table[part.__name__])
        if part.__name__ in AS_THEY_ARE:
            return part
        raise ConfigError(f"{field or 'model'}: {part.__name__} has no invariant version; use numerics=stock")
    if isinstance(part, partial):
        built = invariant(part.func, field, own)
        return partial(built, *part.args, **{k: invariant(v, k, own) for k, v in part.keywords.items()})
    if isinstance(part, list):
        return [invariant(p, field, own) for p in part]
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{f.name: invariant(getattr(part, f.name), f.name, own) for f in fields(part) if f.init})
    return part


def _named(path: str) -> Any:
    """The class at a path. The lookup is late, since these modules import torch and Megatron-Core."""
    module, _, name = path.partition(":")
    package = "tp_invariant_recipes" if module.startswith("portable.") else "tp_invariant_recipes.numerics"
    return getattr(import_module(f"{package}.{module}"), name)


def replacements(numerics: dict[str, Any]) -> tuple[Replacement, ...]:
    """Replacements of classes and functions that Megatron uses by name. Empty for stock numerics.

    numerics: mode, virtual_shards, data_shards, context_shards, grad_norm, clip_rounding, as in the configuration.
              Without data_shards: for a program with a training loop of its own.
    """
    if numerics["mode"] == "stock":
        return ()
    rows = [
        _built_by_name("ColumnParallelLinear", "InvariantColumnParallelLinear"),
        _built_by_name("VocabParallelEmbedding", "InvariantVocabParallelEmbedding"),
        Replacement(
            "megatron.core.tensor_parallel:vocab_parallel_cross_entropy",
            _cross_entropy(numerics["virtual_shards"], numerics["mode"]),
            "sum(exp) over the vocabulary crosses ranks",
        ),
        Replacement(
            "megatron.core.models.hybrid.hybrid_block:TENorm",
            _hybrid_norm,
            "HybridStack builds its final norm by name",
        ),
        *(
            Replacement(
                f"megatron.core.optimizer.{module}:get_grad_norm_fp32",
                lambda _: _named(NORMS[numerics["grad_norm"]]),
                _NORM_WHY,
            )
            for module in ("optimizer", "layer_wise_optimizer")
        ),
        Replacement(
            "megatron.core.optimizer.optimizer:ChainedOptimizer.get_grad_norm",
            _chained_norm(numerics["grad_norm"]),
            "the norms of experts and of all else are rounded before they are put together",
        ),
        Replacement(
            "megatron.core.optimizer.optimizer:ChainedOptimizer.step",
            lambda original: _named("sums.pending_norm:reading_late")(original),
            "the exact norm is a number, and the GPU would wait for it while the host collects the gradients to clip",
        ),
        *_data_parallel(numerics.get("data_shards"), numerics.get("context_shards") or 1),
        *_context_parallel(numerics.get("context_shards") or 1),
    ]
    if installed("transformer-engine") is not None:
        rows.append(
            Replacement(
                "transformer_engine.pytorch.attention.dot_product_attention.utils:get_attention_backend",
                lambda original: _named("megatron.te:without_flash")(original),
                "model.attention_backend=auto allows flash-attn, whose backward groups sums by the number of heads",
            )
        )
    if numerics["clip_rounding"] == "pow2":
        rows.append(
            Replacement(
                "megatron.core.optimizer.optimizer:clip_grad_by_total_norm_fp32",
                lambda original: _named("sums.grad_norm:clip_by_powers_of_two")(original),
                "numerics.clip_rounding=pow2: scaling by a power of two is exact",
            )
        )
    if numerics["mode"] == "portable":
        rows += _portable()
    return tuple(rows)


def _portable() -> list[Replacement]:
    """What numerics=portable replaces beside."""
    stated = "a library's function has other bits on another machine"

    def row(target: str, path: str, why: str = stated) -> Replacement:
        return Replacement(target, lambda _: _named(path), why)

    def made(target: str, path: str, why: str = stated) -> Replacement:
        return Replacement(target, lambda original: _named(path)(original), why)

    return [
        row("megatron.core.transformer.mlp:MLP.forward", "portable.layers:mlp_forward"),
        row("megatron.core.transformer.attention:apply_rotary_pos_emb", "portable.layers:apply_rotary_pos_emb"),
        *torch_adam.REPLACEMENTS,
        made("torch.optim:AdamW", "portable.training:portable_adam"),
        made("torch.optim:Adam", "portable.training:portable_adam"),
        made("megatron.core.optimizer_param_scheduler:math", "portable.training:portable_math"),
        made(
            "megatron.bridge.training.gpt_step:masked_next_token_loss",
            "portable.training:masked_next_token_loss",
            "torch adds the tokens' losses in an order that depends on the processor's vectors",
        ),
    ]


def _context_parallel(shards: int) -> tuple[Replacement, ...]:
    """What a rank has of a sequence. shards: C."""
    rows = (
        (
            "megatron.bridge.training.gpt_step:get_batch_on_this_cp_rank",
            "megatron.context_parallel:batch_of_a_rank",
            "tokens lie context shard by context shard, on one rank too",
        ),
        (
            "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.forward",
            "megatron.context_parallel:rotary_of_a_rank",
            "so do their positions",
        ),
        (
            "megatron.bridge.training.gpt_step:masked_next_token_loss",
            "megatron.context_parallel:loss_of_a_rank",
            "a rank's tokens would count by their number on that rank",
        ),
    )
    return tuple(Replacement(at, partial(_made, ours, (shards,)), why) for at, ours, why in rows if shards > 1)


def _data_parallel(shards: int | None, contexts: int) -> tuple[Replacement, ...]:
    """Sums over data-parallel ranks. shards: D. None: one a rank; a program of its own decides which data it reads.

    contexts: C.
    """
    ddp, schedules = "megatron.core.distributed:DistributedDataParallel", "megatron.core.pipeline_parallel.schedules"
    bucket = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
    metrics = "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker"
    rows = (
        (f"{ddp}.__init__", "megatron.data_parallel:prepared", "a rank may have several shards", (shards, contexts)),
        (
            f"{ddp}._make_backward_post_hook",
            "megatron.data_parallel:noting_its_model",
            "a shard ends with a backward pass",
            (),
        ),
        (
            f"{schedules}:backward_step",
            "megatron.data_parallel:ending_a_micro_batch",
            "a shard ends with a backward pass",
            (),
        ),
        (
            f"{bucket}.start_grad_sync",
            "megatron.data_parallel:tree_over_ranks",
            "collectives add in an order of their own",
            (),
        ),
        (
            f"{ddp}.finish_grad_sync",
            "megatron.data_parallel:restarting",
            "a tied weight's lookups are summed apart from the output layer's gradient, in one order for every pp",
            (),
        ),
        (f"{ddp}.zero_grad_buffer", "megatron.data_parallel:zeroing_contexts", "gradients lie in more buffers", ()),
        (
            f"{ddp}._make_forward_pre_hook",
            "megatron.data_parallel:reading_below",
            "layers read weights of modules that never run, which may still be on their way",
            (READ_BELOW,),
        ),
    )
    of_runs = (
        (
            f"{schedules}:forward_step_calc_loss",
            "megatron.data_parallel:divided_by_all_ranks",
            "dp changes no rounding",
            (),
        ),
        (
            "megatron.bridge.training.train:get_forward_backward_func",
            "sums.step_values:losses_summed",
            "the loss is a sum over micro-batches and ranks",
            (shards, contexts),
        ),
        (
            "megatron.bridge.data.loaders:build_pretraining_data_loader",
            "megatron.data_order:consecutive",
            "which sequences a shard has must not depend on dp",
            (),
        ),
        (f"{metrics}.record", "sums.step_values:metrics_kept_apart", "router statistics are sums too", ()),
        (f"{metrics}._sync_metrics", "sums.step_values:metrics_summed", "router statistics are sums too", (shards,)),
    )
    return tuple(
        Replacement(target, partial(_made, ours, more), why)
        for target, ours, why, more in (*rows, *(of_runs if shards is not None else ()))
    )


def _made(ours: str, more: tuple[Any, ...], original: Any) -> Any:
    return _named(ours)(original, *more)


def _hybrid_norm(original: Any) -> Any:
    """The hybrid norm exists only with Transformer Engine or on our CPU host; hybrid models need one of them, too."""
    absent = original.__name__ == "TENorm" and installed("transformer-engine") is None  # or a placeholder of it
    return original if absent else _named(SUBSTITUTES[original.__name__])


def _chained_norm(grad_norm: str) -> Callable[[Any], Any]:
    return lambda original: _named("sums.grad_norm:chained_grad_norm") if grad_norm == "exact" else original


def _built_by_name(name: str, substitute: str) -> Replacement:
    why = "GPTModel builds its embedding and output layer by name"
    return Replacement(f"megatron.core.tensor_parallel:{name}", lambda _: _named(f"megatron.local:{substitute}"), why)


def _cross_entropy(shards: int, mode: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        from tp_invariant_recipes.numerics.layers.cross_entropy import kernels_of, vocab_parallel_cross_entropy
        from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

        def loss(logits, target, label_smoothing: float = 0.0, tp_group=None):
            if label_smoothing:
                raise NotImplementedError("label smoothing has no invariant version")
            return vocab_parallel_cross_entropy(logits, target, VirtualMesh.of(shards, tp_group), kernels_of(mode))

        return loss

    return make
