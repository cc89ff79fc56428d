# SPDX-License-Identifier: Apache-2.0
"""Values of a step that are logged (loss, token counts, router statistics): summed by the tree that sums gradients.

Each micro-batch has a value, or one for each context shard (numerics/sums/data_shards.py) or for each sequence of a
packed row (numerics/megatron/attention/packed.py). A data shard is the sum
of its micro-batches' values in order; the D shards are a tree, and a data-parallel rank has D/dp consecutive ones, or
every dp-th (numerics/megatron/fsdp.py). With
context shards each has such a tree, and their sums are a tree over C.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.kernels.row_sums import token_sum
from tp_invariant_recipes.numerics.sums import bucket_reduction, data_shards
from tp_invariant_recipes.numerics.sums.expert_groups import visited
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import tree_all_reduce, tree_sum, tree_sums

Rows = dict[int, dict[int, Tensor]]  # micro-batch or packed row -> sequence of the row, else 0 -> value


@torch.no_grad()
def summed(values: Tensor, data: VirtualMesh, context: VirtualMesh | None = None) -> Tensor:
    """Return the sum over all micro-batches of all ranks.

    values:  [micro-batches of this rank, n] fp32, in order; [micro-batches, C/cp, n] with `context`.
    data:    D shards on dp ranks. context: C shards on cp ranks.
    returns: [n] fp32 on the first rank, and zeros on the others: Megatron's sum over ranks then adds nothing inexactly.
    """
    if data_shards.in_turn(len(values) * data.size, data.shards):  # shards that run side by side are neighbours
        ranks, each = replace(data, shards=data.size), token_sum(values.flatten(1), len(values))
        total = tree_sum(tree_all_reduce(tree_sums(each).unsqueeze(0), ranks, torch.float32))
    else:
        total = tree_all_reduce(tree_sums(token_sum(values.flatten(1), data.local)), data, torch.float32)
    if context is not None:
        total = tree_all_reduce(total.view(values.shape[1:]), context, torch.float32)
    return torch.zeros_like(total) if data.rank or (context and context.rank) else total


def data_mesh(shards: int) -> VirtualMesh:
    """D shards on this model's data-parallel ranks."""
    from megatron.core import parallel_state

    return VirtualMesh.from_group(shards, parallel_state.get_data_parallel_group())


def losses_summed(original: Callable[..., Any], shards: int, contexts: int) -> Callable[..., Any]:
    """Return a replacement for the get_forward_backward_func of Bridge's train() and evaluate(), which add up what each
    micro-batch gives. It returns one entry instead of one a micro-batch: {name: [2] fp32: a sum and its tokens}.
    """

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        run = original(*args, **kwargs)

        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            losses = run(*args, **kwargs)
            reduces = losses and not kwargs.get("collect_non_loss_data")
            return [_summed(losses, shards, contexts)] if reduces else losses

        return forward_backward

    return get_forward_backward_func


def _summed(losses: Sequence[dict[str, Tensor]], shards: int, contexts: int) -> dict[str, Tensor]:
    from megatron.core import parallel_state

    meshes, shape = [data := data_mesh(shards)], [-1]
    if contexts > 1:
        meshes.append(VirtualMesh.from_group(contexts, parallel_state.get_context_parallel_group()))
        shape = [-1, 2]
    return {
        name: summed(_of_sequences([values[name] for values in losses], data.local), data)
        if value.dim() == 2  # of packed rows
        else summed(torch.stack([values[name].view(shape).float() for values in losses]), *meshes)
        for name, value in losses[0].items()
    }


def _of_sequences(values: list[Tensor], shards: int) -> Tensor:
    """[sequences, n] of each micro-batch of a rank → [shards, n]: the sums of its data shards, whatever was packed."""
    each = len(values) // shards
    parts = [torch.cat(values[first : first + each]) for first in range(0, len(values), each)]
    return torch.cat([tree_sums(token_sum(part, 1)) for part in parts])


def separate_metrics(original: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement for MoEMetricsTracker.record, which adds to one sum: it keeps each micro-batch's value as
    well.

    Of a packed row it keeps each sequence's by its number: layers that are computed again come in another order.
    """

    def record(self: Any, name: str, value: Tensor, layer_number: int | None, *args: Any, **kwargs: Any) -> None:
        original(self, name, value, layer_number, *args, **kwargs)
        if layer_number is not None:
            each = self.__dict__.setdefault("micro_batches", {}).setdefault(name, {})
            keep(each.setdefault(layer_number - 1, {}), value)

    return record


def keep(rows: Rows, value: Tensor) -> None:
    """Keep the value of the micro-batch that runs, or of the sequence of a packed row."""
    now = bucket_reduction.current()
    if now is not None and now.idle:
        return
    row, number = (visited(len(rows)), 0) if now is None else (now.row, now.number)
    term = value.detach().float() * (1.0 if now is None else now.metric_share)
    of_row = rows.setdefault(row, {})
    of_row[number] = of_row[number] + term if number in of_row else term  # a layer may run several times


def of_rows(rows: Rows) -> list[Tensor]:
    """Return what was kept: the sum of each row's values, in the order of its sequences."""
    return [sum((row[n] for n in sorted(row)[1:]), row[min(row)]) for _, row in sorted(rows.items())]


def metrics_summed(original: Callable[..., None], shards: int) -> Callable[..., None]:
    """Return a replacement for MoEMetricsTracker._sync_metrics, which sums over ranks."""

    def sync(self: Any, metric_names: list[str], *args: Any, **kwargs: Any) -> None:
        kept = self.__dict__.pop("micro_batches", {})
        mesh = data_mesh(shards)
        for name in metric_names:
            of_layers = {layer: of_rows(rows) for layer, rows in kept.get(name, {}).items()}
            # MTP may compute a layer several times; how often others are does not matter to its sum.
            for rows in sorted({len(values) for values in of_layers.values()}):
                layers = sorted(layer for layer, values in of_layers.items() if len(values) == rows)
                values = torch.stack([torch.stack(of_layers[layer]) for layer in layers], 1)
                self._metrics[name].values[layers] = summed(values, mesh)
        original(self, metric_names, *args, **kwargs)

    return sync
