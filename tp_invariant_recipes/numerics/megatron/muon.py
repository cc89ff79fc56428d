# SPDX-License-Identifier: Apache-2.0
"""Muon whose bits do not depend on the layout: Megatron's Newton-Schulz steps on whole matrices, in one order of rows.

    fc1 at tp=1     [ gate 0 | gate 1 | up 0 | up 1 ]
    at tp=2         [ gate 0 | up 0 ]   [ gate 1 | up 1 ]

The steps multiply a matrix by its transpose, so each number is a sum over the whole of it. Megatron's own
`muon_tp_mode=duplicated` gathers the ranks' rows as they come: gate 0, up 0, gate 1, up 1. Here they come in the order
of tp=1. Every rank then makes the same calls of one library with the same shapes, and takes its part of the result.

The momentum, the weight decay and the update work on single elements. Which data-parallel rank computes a matrix
changes no bit, so Megatron's layer-wise optimizer is as good as one that every rank repeats.

Muon: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024. Megatron's module
megatron.core.optimizer.emerging_optimizers splits q, k and v; the package emerging_optimizers has the steps.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.function_modes import outside_modes
from tp_invariant_recipes.numerics.megatron import init

DUPLICATED, BLOCKWISE = "duplicated", "blockwise"


@dataclass(frozen=True)
class MatrixCut:
    """How tensor parallelism cuts a matrix: the dimension, and this rank's rows or columns of each of its segments."""

    dim: int
    sizes: tuple[int, ...]


def whole_matrices(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for megatron.core.optimizer._create_emerging_optimizer."""

    def _create_emerging_optimizer(
        config: Any, groups: Any, name: str, chunks: Any, processes: Any
    ) -> tuple[Any, Callable[..., None]]:
        distributed = any(chunk.ddp_config.use_distributed_optimizer for chunk in chunks)
        if name != "muon" or config.muon_tp_mode != DUPLICATED or distributed:
            raise ConfigError(
                f"optimizer={name} muon_tp_mode={config.muon_tp_mode} use_distributed_optimizer={distributed} has no "
                f"invariant version; optimizer=muon muon_tp_mode={DUPLICATED} use_distributed_optimizer=False"
            )
        if config.use_layer_wise_distributed_optimizer and _owns_copies(chunks, processes):
            raise ConfigError(
                "use_layer_wise_distributed_optimizer=True: without data-parallel ranks each copy of an expert counts "
                "as one of its own; use_layer_wise_distributed_optimizer=False"
            )
        optimizer, init_state = original(config, groups, name, chunks, processes)
        _gather(optimizer, chunks, processes.tp)
        return optimizer, init_state

    return _create_emerging_optimizer


def _owns_copies(chunks: Iterable[Any], processes: Any) -> bool:
    """As check/invariant/training.py has it of a recipe's run."""
    experts = any(chunk.config.num_moe_experts for chunk in chunks)
    return experts and processes.dp_cp.size() == 1 < processes.expt_dp.size()


def _gather(optimizer: Any, chunks: Iterable[Any], group: Any) -> None:
    orthogonalize = optimizer.orthogonalize
    optimizer.tp_mode = BLOCKWISE  # it gathers nothing: what it gets is all there is
    cuts: dict[int, MatrixCut | None] = {}

    @outside_modes
    def of_whole(weight: Tensor, momentum: Tensor, /, **settings: Any) -> Tensor:
        if not cuts:  # by now the optimizer has its master weights
            cuts.update(
                (id(getattr(parameter, "main_param", parameter)), cut) for parameter, cut in _cuts(chunks, group.size())
            )
        cut = cuts[id(weight)]
        whole = gathered(momentum, cut, group)
        return part_of(orthogonalize(weight, whole, **settings), cut, group)

    optimizer.orthogonalize = of_whole


def _cuts(chunks: Iterable[Any], ranks: int) -> Iterator[tuple[Tensor, MatrixCut | None]]:
    """Yield the matrices of a rank's model chunks; None: every tensor-parallel rank has it whole.

    Raises ConfigError for a matrix without a rule in megatron/init.py.
    """
    for chunk in chunks:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        for name, weight in init.canonical_parameters(chunk):
            if weight.ndim != 2:
                continue
            rule = init.rule_of(name)
            if rule is None:
                raise ConfigError(f"{name}: no rule specifies how tensor parallelism shards it (megatron/init.py)")
            rows = init.segment_rows(weight.shape[rule.dim], init.segments(rule, weight, chunk.config))
            yield weight, None if rule.whole or ranks == 1 else MatrixCut(rule.dim, tuple(rows))


def gathered(part: Tensor, cut: MatrixCut | None, group: Any) -> Tensor:
    """Return the whole matrix in the order of tp=1, in memory of its own: kernels may add in another order elsewhere.

    part: this rank's [m/t, n] or [m, n/t] of `cut`, or [m, n]. returns: [m, n].
    """
    if cut is None:
        return part.clone(memory_format=torch.contiguous_format)
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    pieces = [part.split(cut.sizes, cut.dim) for part in parts]
    return torch.cat([piece for segment in zip(*pieces, strict=True) for piece in segment], cut.dim)


def part_of(whole: Tensor, cut: MatrixCut | None, group: Any) -> Tensor:
    """Return this rank's part of a whole matrix, contiguous: what `gathered` made a whole of."""
    if cut is None:
        return whole.contiguous()
    segments = whole.split([size * group.size() for size in cut.sizes], cut.dim)
    return torch.cat([segment.chunk(group.size(), cut.dim)[group.rank()] for segment in segments], cut.dim)
