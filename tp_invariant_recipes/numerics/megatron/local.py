# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's local layers with invariant sums."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

from tp_invariant_recipes.function_modes import LayerFunction, outside_modes
from tp_invariant_recipes.kernels import activations as kernel
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.layers import cross_entropy
from tp_invariant_recipes.numerics.layers.embedding import lookup
from tp_invariant_recipes.numerics.megatron.attention.core_attention import CoreAttention, Mask
from tp_invariant_recipes.numerics.megatron.base import (
    ColumnForward,
    HeadNormForward,
    NormForward,
    RowForward,
)
from tp_invariant_recipes.numerics.sums.data_shards import of_a_rank
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh


def cross_entropy_of_mode(original: Any, virtual_shards: int, name: str) -> Callable[..., Tensor]:
    """Return a replacement for Megatron's vocab_parallel_cross_entropy. name: of the mode."""

    def loss(
        vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None
    ) -> Tensor:
        if label_smoothing:
            raise NotImplementedError("label smoothing has no invariant version")
        mesh = VirtualMesh.from_group(virtual_shards, tp_group or get_tensor_model_parallel_group())
        return cross_entropy.vocab_parallel_cross_entropy(vocab_parallel_logits, target, mesh, kernels)

    kernels = mode.named_mode(name).cross_entropy()
    return loss


def compile_nothing(*_: Any) -> None:
    """Replace Bridge's `set_jit_fusion_options`, which compiles forms with biases and dropout by calling them."""


def residual_add(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replace `_bias_dropout_add_func` and its compiled form: without a bias and dropout it is one addition."""

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float, *training: bool) -> Tensor:
        x, bias = x_with_bias
        total = _sum(residual, x) if bias is None and not prob else None
        return original(x_with_bias, residual, prob, *training) if total is None else total

    return add


@outside_modes
def _sum(residual: Tensor, x: Tensor) -> Tensor | None:
    return residual + x if x.dtype == residual.dtype else None


def rotated(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replace `_apply_rotary_pos_emb_bshd`: on a CPU one function of autograd with the bits of its ten."""

    @wraps(original)
    def rotate(
        t: Tensor, freqs: Tensor, rotary_interleaved: bool = False, mla_rotary_interleaved: bool = False,
        mscale: float = 1.0, **more: Any,
    ) -> Tensor:  # fmt: skip
        cosine, sine = (None, None) if rotary_interleaved or mla_rotary_interleaved else _turns(t, freqs, mscale)
        if cosine is None:
            return original(t, freqs, rotary_interleaved, mla_rotary_interleaved, mscale, **more)
        return _Rotated.apply(t, cosine, sine)

    return rotate


@outside_modes
def _turns(t: Tensor, freqs: Tensor, mscale: float) -> tuple[Tensor | None, Tensor | None]:
    """Return cos and sin of all angles of t in its dtype, kept with the angles. None: of a GPU, or of a part of t."""
    if t.is_cuda or freqs.shape[-1] != t.shape[-1]:
        return None, None
    kind = mscale, t.dtype, freqs._version
    kept: Any = getattr(freqs, "turns", (None,))
    if kept[0] != kind:
        turns = [(turn(freqs) * mscale).to(t.dtype) for turn in (torch.cos, torch.sin)]
        freqs.turns = kept = kind, *turns  # type: ignore[attr-defined]
    return kept[1], kept[2]


class _Rotated(LayerFunction):
    """t · cos + (-t2, t1) · sin, each operation rounded. t: [s, b, heads, d]; cos, sin: [s, 1, 1, d]."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        first, second = t.chunk(2, -1)
        return (t * cosine).add_(torch.cat((-second, first), -1).mul_(sine))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        first, second = (gradients[0] * sine).chunk(2, -1)
        # Megatron's has a second gradient: zeros, of the features that are not rotated. They turn -0.0 into 0.0.
        return torch.cat((second, -first), -1).add_(gradients[0] * cosine).add_(0.0), None, None


def swiglu(original: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Replace `swiglu`: [rows, 2f] → [rows, f]."""
    return lambda x: kernel.swiglu(x) if _taken(x) else original(x)


def swiglu_back(original: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Replace `swiglu_back`: gradient [rows, f] and input [rows, 2f] → the input's gradient."""
    return lambda dy, x: kernel.swiglu_backward(dy, x) if _taken(dy, x) else original(dy, x)


def _taken(*operands: Tensor) -> bool:
    """Whether the kernel takes them, outside other functions that are compiled."""
    return not torch.compiler.is_compiling() and all(
        x.is_cuda and x.dim() == 2 and x.is_contiguous() and x.dtype == operands[0].dtype for x in operands
    )


class InvariantColumnParallelLinear(ColumnForward, ColumnParallelLinear):
    """Column-parallel linear layer; on every device also Megatron's output layer."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[s/t or s, b, k] → [s, b, n/t], and None as bias, since the layer has added it."""
        if runtime_gather_output or (runtime_gather_output is None and self.gather_output):
            raise NotImplementedError("an invariant column-parallel layer does not gather its output")
        return self.column(input_, self.weight if weight is None else weight, self.bias), None


class InvariantRowParallelLinear(RowForward, RowParallelLinear):
    """Row-parallel linear."""

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """[s, b, k/t] → [s/t or s, b, n], and None as bias, since the layer has added it."""
        return self.row(input_, self.weight, self.bias), None


class InvariantVocabParallelEmbedding(VocabParallelEmbedding):
    """Embedding: across ranks it sums one value and zeros, which is exact but for the sign of zero.

    ahead: whether a lookup is one of MTP (numerics/megatron/mtp.py).
    """

    tensor_model_parallel, partition_dim, ahead = True, 0, False

    def forward(self, input_: Tensor) -> Tensor:
        """[b, s] → [b, s, h], or [s/t, b, h] with sequence parallelism."""
        ids, elsewhere = input_, None
        if self.tp_group.size() > 1:
            elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
            ids = input_ - self.vocab_start_index
        rows = lookup(self.weight, ids, elsewhere, of_a_rank(self.config), ahead=self.ahead)
        if self.reduce_scatter_embeddings:
            rows = rows.transpose(0, 1).contiguous()
            return reduce_scatter_to_sequence_parallel_region(rows, group=self.tp_group) + 0.0
        if elsewhere is not None:
            rows = reduce_from_tensor_model_parallel_region(rows, group=self.tp_group)
        return rows + 0.0


class InvariantPositionEmbedding(torch.nn.Embedding):
    """A vector for each position. The sequences of a packed row have the same ones."""

    config: Any

    def forward(self, input: Tensor) -> Tensor:
        """[b, s] → [b, s, h]."""
        return lookup(self.weight, input, None, of_a_rank(self.config))


def with_positions(original: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement for LanguageModelEmbedding.__init__."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        if self.add_position_embedding:
            self.position_embeddings.__class__ = InvariantPositionEmbedding
            self.position_embeddings.config = config

    return __init__


class InvariantRMSNorm(NormForward, torch.nn.Module):
    """RMSNorm over the hidden size."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.__dict__["sequence_parallel"] = config.sequence_parallel  # read by Megatron's gradient reduction


class InvariantLayerNorm(InvariantRMSNorm):
    """LayerNorm over the hidden size."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = torch.nn.Parameter(torch.zeros_like(self.weight))
        self.bias.__dict__["sequence_parallel"] = config.sequence_parallel


class InvariantNorm:
    """Makes the norm that `normalization` names, as Megatron-Core's WrappedTorchNorm does."""

    def __new__(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        """One of the two classes above."""
        kind = InvariantLayerNorm if config.normalization == "LayerNorm" else InvariantRMSNorm
        return kind(config, *args, **kwargs)


class InvariantHeadNorm(HeadNormForward, InvariantRMSNorm):
    """RMSNorm of queries or keys."""


@outside_modes
def _sizes(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int, int]:
    return query.shape[2], key.shape[2], value.shape[3]


class InvariantDotProductAttention(CoreAttention, DotProductAttention):
    """Attention of torch's batched products."""

    def launch(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, sinks: Tensor | None = None) -> Tensor:
        """Megatron's forward, for the heads given. It reads their number, and theirs alone, from its attributes."""
        heads, groups, width = _sizes(query, key, value)
        self.__dict__.update(  # a module's own way takes longer
            num_attention_heads_per_partition=heads,
            num_query_groups_per_partition=groups,
            hidden_size_per_partition=heads * width,
        )
        with self.with_sinks(sinks):
            return DotProductAttention.forward(self, query, key, value, *mask)

    def selected(self, length: int, batch: int) -> str:
        """Return the only one."""
        return self.backend()

    def backend(self) -> str:
        """Return the only one."""
        return "local"

    def settings(self) -> tuple[Any, ...]:
        """Factors of the scores before and in the softmax, and the window."""
        return self.softmax_scale, self.scale_mask_softmax.scale, self.scale_mask_softmax.window_size
