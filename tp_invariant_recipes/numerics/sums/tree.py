# SPDX-License-Identifier: Apache-2.0
"""Tree sums across ranks: V partials, neighbours added level by level in fp32, one rounding at the root.

A rank's shards are a subtree: it adds them, sends one node, and the receiver finishes the same tree. Collectives only
move bytes; every addition is in kernels/. device.peer_memory has ranks of one host use symmetric memory instead
(numerics/sums/symmetric_memory.py), with the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp_invariant_recipes.kernels.tree_add import tree_add
from tp_invariant_recipes.numerics.sums import later
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.symmetric_memory import PeerSum, peers_of


@dataclass
class Moving:
    """Bytes in communication. `arrived` waits for them; on a GPU, the stream waits.

    buffer: their destination; works: the collectives; none: nothing moves.
    """

    buffer: Tensor
    works: tuple[Any, ...] = ()

    def arrived(self) -> Tensor:
        """Return the buffer, complete."""
        for work in self.works:
            work.wait()
        self.works = ()
        return self.buffer

    def finished(self, dtype: torch.dtype) -> Tensor:
        """Return the tree sum of the nodes that arrive for this rank's slice, [tokens/t, features] of `dtype`."""
        return tree_sum(self.arrived(), dtype)


def tree_sum(partials: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Add the leading dimension in tree order.

    partials: [n, …] fp32, contiguous, n a power of two.
    returns:  […] of `dtype`, (p0 + p1) + (p2 + p3) … with neighbours added at every level.
    """
    if partials.shape[0] == 1 and dtype == partials.dtype:
        return partials[0]
    return tree_add(partials, torch.empty(*partials.shape[1:], dtype=dtype, device=partials.device))


def tree_sums(partials: Tensor) -> Tensor:
    """Add each group's partials in tree order: [groups, R, …] fp32, contiguous, R a power of two → [groups, …]."""
    groups, width, *shape = partials.shape
    return partials[:, 0] if width == 1 else tree_add(partials, partials.new_empty(groups, *shape), groups)


def tree_all_reduce(partials: Tensor, mesh: VirtualMesh, dtype: torch.dtype) -> Tensor:
    """Sum the V partials of all ranks in tree order, on every rank. For small tensors: t nodes are gathered.

    partials: [V/t, …] fp32, this rank's shards in order.
    returns:  […] of `dtype`, the same bits on every rank and for every t dividing V.
    """
    node = tree_sum(partials, dtype if mesh.size == 1 else torch.float32)
    if mesh.size == 1:
        return node
    return tree_sum(all_gather(node.unsqueeze(0), mesh), dtype)


def reduce_scatter_by_slices(
    operand: Tensor, features: int, mesh: VirtualMesh, nodes: Callable[[slice], Tensor]
) -> PeerSum | None:
    """Start a sum whose slices are sent as soon as each is computed; None: only whole nodes can be sent.

    operand: [tokens, k/t] of the GEMM that the nodes, [tokens, features], come from.
    nodes:   computes those of some tokens, [n, tokens, features] fp32, as `start_reduce_scatter` takes them.
    """
    tokens = operand.shape[0]
    peers = peers_of(mesh.group, operand, tokens // mesh.size * features * 4)
    started = None if peers is None else peers.begin_sum((tokens, features))
    if started is not None:
        for peer in started.peers.order():
            started.send(peer, tree_sum(nodes(started.rows(peer))))
    return started


def start_reduce_scatter(partials: Tensor, mesh: VirtualMesh) -> Moving | PeerSum:
    """Start the sum of all ranks' V partials in tree order; each rank keeps its slice of the tokens.

    partials: [n, tokens, features] fp32, contiguous: the sums of this rank's V/t shards, as n = 1 to V/t nodes of the
              tree, n a power of two; t divides tokens.
    returns:  a sum whose result is [tokens/t, features]: slice `rank` of the whole sum.
    """
    if mesh.size == 1:
        return Moving(partials)
    node = tree_sum(partials)
    peers = peers_of(mesh.group, node, node.numel() // mesh.size * 4)
    if peers is not None and (started := peers.begin_sum(node.shape)) is not None:
        for peer in peers.order():
            started.send(peer, node[started.rows(peer)])
        return started
    return start_all_to_all(node, mesh)


def start_all_to_all(tokens: Tensor, mesh: VirtualMesh) -> Moving:
    """Start sending every rank its slice of each rank's tokens. It only moves bytes.

    tokens: [m, …], t divides m; arrives as [t, m/t, …], in rank order.
    """
    if mesh.size == 1:
        return Moving(tokens.unsqueeze(0))
    if tokens.shape[0] % mesh.size:
        raise ValueError(f"{mesh.size} ranks do not divide {tokens.shape[0]} tokens")
    tokens = tokens.contiguous()
    slices = torch.empty_like(tokens)
    work = dist.all_to_all_single(slices, tokens, group=mesh.group, async_op=True)
    return Moving(slices.view(mesh.size, -1, *tokens.shape[1:]), (work,))


def start_all_gather(slices: Tensor, mesh: VirtualMesh) -> Moving:
    """Start concatenating the ranks' slices along dimension 0, in rank order. It only moves bytes.

    slices: [n/t, …]; arrives as [n, …].
    """
    if mesh.size == 1:
        return Moving(slices)
    peers = peers_of(mesh.group, slices, slices.numel() * slices.dtype.itemsize)
    if peers is not None and (gather := peers.start_gather(slices)) is not None:
        return Moving(gather.whole, (gather,))
    whole = slices.new_empty(mesh.size * slices.shape[0], *slices.shape[1:])
    work = dist.all_gather_into_tensor(whole, slices.contiguous(), group=mesh.group, async_op=True)
    return Moving(whole, (work,))


def all_gather(slices: Tensor, mesh: VirtualMesh) -> Tensor:
    """[n/t, …] on every rank → [n, …]. In a backward pass, GEMMs of weight gradients that wait run meanwhile."""
    gathering = start_all_gather(slices, mesh)
    if mesh.size > 1:
        later.GEMMS.finish()
    return gathering.arrived()
