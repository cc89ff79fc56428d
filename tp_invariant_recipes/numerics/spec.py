"""Which invariant layer stands where: a block specification for Bridge's provider, and what has no seam."""

from collections.abc import Callable
from functools import partial
from typing import Any

from tp_invariant_recipes.replacement import Replacement


def tree_layer_spec(config, vp_stage: int | None = None):
    """Megatron-Core's local transformer block with invariant layers. For `model.transformer_layer_spec`."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    from tp_invariant_recipes.numerics import local_layers as tree

    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = tree.TreeRMSNorm
    attention.linear_qkv, attention.linear_proj = tree.TreeColumnParallelLinear, tree.TreeRowParallelLinear
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = tree.TreeHeadNorm
    layer.mlp = _with_linears(layer.mlp, tree.TreeColumnParallelLinear, tree.TreeRowParallelLinear)
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=tree.TreeRMSNorm)


def _with_linears(mlp: partial, column: type, row: type) -> partial:
    from dataclasses import replace

    return partial(mlp.func, *mlp.args, **mlp.keywords | {"submodules": replace(
        mlp.keywords["submodules"], linear_fc1=column, linear_fc2=row)})  # fmt: skip


def replacements(shards: int) -> tuple[Replacement, ...]:
    """What Megatron builds or calls by name, where no specification reaches.

    shards: V.
    """
    return (
        _built_by_name("ColumnParallelLinear", "TreeColumnParallelLinear"),
        _built_by_name("VocabParallelEmbedding", "TreeVocabParallelEmbedding"),
        Replacement(
            "megatron.core.tensor_parallel:vocab_parallel_cross_entropy",
            _cross_entropy(shards),
            "sum(exp) over the vocabulary crosses ranks",
        ),
        Replacement(
            "megatron.core.optimizer.optimizer:get_grad_norm_fp32",
            _grad_norm,
            "a sum of squares depends on how parameters are sharded",
        ),
    )


def _built_by_name(name: str, invariant: str) -> Replacement:
    why = "GPTModel builds its embedding and output layer by name"
    return Replacement(f"megatron.core.tensor_parallel:{name}", _local_layer(invariant), why)


def _local_layer(name: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        from tp_invariant_recipes.numerics import local_layers

        return getattr(local_layers, name)

    return make


def _grad_norm(original: Any) -> Any:
    from tp_invariant_recipes.numerics.grad_norm import get_grad_norm_fp32

    return get_grad_norm_fp32


def _cross_entropy(shards: int) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        from tp_invariant_recipes.numerics.cross_entropy import vocab_parallel_cross_entropy
        from tp_invariant_recipes.numerics.mesh import VirtualMesh

        def loss(logits, target, label_smoothing: float = 0.0, tp_group=None):
            if label_smoothing:
                raise NotImplementedError("label smoothing has no invariant version")
            size = tp_group.size()
            return vocab_parallel_cross_entropy(
                logits, target, VirtualMesh(shards, size, tp_group.rank(), tp_group if size > 1 else None)
            )

        return loss

    return make
