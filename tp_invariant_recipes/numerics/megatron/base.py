# SPDX-License-Identifier: Apache-2.0
"""Common base of the invariant layers on Megatron-Core's local layers and on its Transformer Engine wrappers.

A layer keeps the parameters, names and checkpoints of the class it replaces; only `forward` is ours. V is
`config.virtual_shards`; `config.invariant_mode` names the mode (numerics/mode.py) that computes.
"""

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

from torch import Tensor

from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.gemm.operands import Split
from tp_invariant_recipes.numerics.layers import linear
from tp_invariant_recipes.numerics.layers.bias import column_bias, row_bias
from tp_invariant_recipes.numerics.layers.experts.experts import (
    ACTIVATION,
    Activation,
    activation_kind,
    expert_mlp,
    mark_separate,
)
from tp_invariant_recipes.numerics.layers.experts.token_dispatcher import Batches
from tp_invariant_recipes.numerics.layers.formats import Format
from tp_invariant_recipes.numerics.layers.formats.fp8 import Fp8, Mxfp8
from tp_invariant_recipes.numerics.layers.formats.plain import PLAIN
from tp_invariant_recipes.numerics.layers.linear import norm_column_parallel
from tp_invariant_recipes.numerics.layers.norm import Norm, NormKernels, NormShards, layer_norm, rms_norm
from tp_invariant_recipes.numerics.precision import Fp8Layers
from tp_invariant_recipes.numerics.sums.data_shards import of_a_rank
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh


@cache
def _operands(name: str) -> Format:
    """Return the operands of a mode, looked up once: layers ask for them in every forward pass."""
    return mode.named_mode(name).operands()


@cache
def _norm(name: str) -> NormKernels:
    """Return the norms of a mode, looked up once."""
    return mode.named_mode(name).norm()


def sequence_shards(config: Any) -> NormShards:
    """How the positions that a rank has make up the V shards."""
    return NormShards.SEQUENCE_SLICE if config.sequence_parallel else NormShards.SEQUENCE_WHOLE


class OnMesh:
    """A layer whose ranks make up a virtual mesh."""

    config: Any

    @cached_property
    def mesh(self) -> VirtualMesh:
        """Looked up once, when the layer first runs."""
        return VirtualMesh.from_group(
            self.config.virtual_shards,
            self.mesh_group(),
            of_a_rank(self.config),
            graphs=getattr(self.config, "cuda_graph_impl", None) not in (None, "none"),
        )

    def mesh_group(self) -> Any:
        """Its process group: tp_group of Megatron-Core's local layers, _tp_group of its Transformer Engine wrappers."""
        return self._tp_group if hasattr(self, "_tp_group") else self.tp_group  # type: ignore[attr-defined]


class MixerOnMesh(OnMesh):
    """What stands in attention's place, with several process groups."""

    def mesh_group(self) -> Any:
        """Its tensor-parallel one."""
        return self.pg_collection.tp  # type: ignore[attr-defined]


class WithGemms:
    """A layer with products."""

    config: Any

    @property
    def operands(self) -> Format:
        """What its GEMMs compute with."""
        return _operands(self.config.invariant_mode)


def _normal(layer: OnMesh, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, shards_of: NormShards) -> Tensor:
    """x's LayerNorm; without a bias its RMSNorm, of the mode's kernels."""
    config = layer.config
    centred = config.layernorm_zero_centered_gamma
    if bias is not None:
        return layer_norm(x, weight, bias, eps, layer.mesh, config.sequence_parallel, centred=centred)
    return rms_norm(x, weight, eps, layer.mesh, shards_of, _norm(config.invariant_mode), centred=centred)


class ColumnForward(WithGemms, OnMesh):
    """Forward of a column-parallel layer, which has config, weight, bias, segments and a group."""

    tensor_model_parallel, partition_dim = True, 0  # by these Bridge splits weights
    segments: Split

    def __init__(self, *args: Any, tp_comm_buffer_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, tp_comm_buffer_name=tp_comm_buffer_name, **kwargs)  # type: ignore[call-arg]
        # Megatron names the fused gate and up projection "fc1".
        self.segments = 2 if tp_comm_buffer_name == "fc1" and self.config.gated_linear_unit else 1

    def column(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[s/t or s, b, k] → [s, b, n/t]."""
        sliced = self.config.sequence_parallel
        y = linear.column_parallel(x, weight, self.mesh, self.segments, sliced, self.operands)
        return y if bias is None else column_bias(y, bias, self.mesh.contexts)

    def norm_column(
        self, x: Tensor, norm: tuple[Tensor, Tensor | None], eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """`column` of x's norm. Of an RMSNorm and plain operands, one function of autograd computes both.

        norm: its weight and bias; without a bias it is an RMSNorm.
        """
        if norm[1] is not None or self.operands is not PLAIN:
            return self.column(self.normal(x, norm, eps), weight, bias)
        layer = linear.Column(self.mesh, self.segments, self.config.sequence_parallel and self.mesh.size > 1)
        centred = self.config.layernorm_zero_centered_gamma
        passes = Norm(self.mesh, sequence_shards(self.config), centred=centred)
        y = norm_column_parallel(x, norm[0], weight, eps, passes, layer)
        return y if bias is None else column_bias(y, bias, self.mesh.contexts)

    def normal(self, x: Tensor, norm: tuple[Tensor, Tensor | None], eps: float) -> Tensor:
        """x's norm. norm: as of `norm_column`."""
        return _normal(self, x, *norm, eps, sequence_shards(self.config))


class RowForward(WithGemms, OnMesh):
    """Forward of a row-parallel layer, which has config, weight, bias and a group."""

    tensor_model_parallel, partition_dim = True, 1

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[s, b, k/t] → [s/t or s, b, n]."""
        y = linear.row_parallel(x, weight, self.mesh, self.config.sequence_parallel, self.operands)
        return y if bias is None else row_bias(y, bias, self.mesh, self.config.sequence_parallel)


class ExpertsForward(WithGemms):
    """Forward of experts, which has config."""

    activation: Activation = ACTIVATION

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        mark_separate(self)  # type: ignore[arg-type]

    def experts(
        self,
        rows: Tensor,
        probs: Tensor,
        batches: Batches,
        fc1: Sequence[Tensor],
        fc2: Sequence[Tensor],
        biases: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
    ) -> Tensor:
        """[r, h] → [r, h]; arguments as of `expert_mlp`."""
        kind, adapters = activation_kind(self.config), (adapter_of(self, "linear_fc1"), adapter_of(self, "linear_fc2"))
        return expert_mlp(rows, probs, batches, fc1, fc2, kind, self.operands, self.activation, biases, adapters)


def adapter_of(experts: Any, name: str) -> Any:
    """Return the adapter of `name`, which Bridge wraps where it has one: all experts' first or second product.

    None: none.
    """
    return getattr(getattr(experts, name, None), "adapter", None)


class OnMegatronsMesh(OnMesh):
    """A layer that is told of no process group: its mesh has Megatron's tensor-parallel one."""

    def mesh_group(self) -> Any:
        """Megatron's own."""
        from megatron.core.parallel_state import get_tensor_model_parallel_group

        return get_tensor_model_parallel_group()


class NormForward(OnMegatronsMesh):
    """Forward of a norm over the hidden size; rows are positions. With a `bias` it is a LayerNorm, else an RMSNorm."""

    weight: Tensor
    eps: float

    def shards_of(self) -> NormShards:
        """How the rows of this rank make up the V shards."""
        return sequence_shards(self.config)

    def forward(self, x: Tensor) -> Tensor:
        """[s/t or s, b, h] → the same."""
        return _normal(self, x, self.weight, getattr(self, "bias", None), self.eps, self.shards_of())


class HeadNormForward(NormForward):
    """Forward of an RMSNorm of queries or keys; rows are heads, [s, b, heads/t, d]."""

    def shards_of(self) -> NormShards:
        """Heads are sharded whatever the sequence is."""
        return NormShards.HEADS


def layers_of_stack(original: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement for HybridStack.__init__, whose specification has one class for all layers of a kind.

    As in Megatron's, layers ahead (MTP) count from the first one of their own.
    """

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        fp8_layers = getattr(config, "fp8_layers", None)
        if fp8_layers is None:
            return
        for layer in self.layers:
            if not fp8_layers.contains(layer.layer_number - 1, config.num_layers):
                for part in (module for module in layer.modules() if isinstance(module, Fp8Mixin)):
                    part.in_bf16 = True

    return __init__


def operands_of(layers: Fp8Layers, arithmetic: "mode.Mode", group: Any) -> Format:
    """Operands of layers in FP8. group: of the ranks that share a sequence; None: one rank has all."""
    if layers.recipe == "mxfp8":
        return Mxfp8.from_layers(layers, arithmetic.operands().products)
    return Fp8.from_layers(layers, group)


class Fp8Mixin(WithGemms):
    """A layer whose GEMMs are in FP8. in_bf16: they are not, since a hybrid model's stack says so."""

    in_bf16 = False

    @property
    def operands(self) -> Format:
        """As Plain's where the layer is in bf16."""
        return super().operands if self.in_bf16 else self._fp8

    @cached_property
    def _fp8(self) -> Format:
        from megatron.core.parallel_state import get_tensor_and_context_parallel_group

        group = get_tensor_and_context_parallel_group()
        return operands_of(self.config.fp8_layers, mode.mode_of(self.config), group if group.size() > 1 else None)
