# SPDX-License-Identifier: Apache-2.0
"""A rank of tests/gpu/test_peer_memory_gpu.py, under torchrun:

    python -m torch.distributed.run --nproc-per-node 2 -m tests.gpu.peer_ranks CASE

prints one line of JSON on rank 0: the case's result on each rank.
"""

import json
import os
import sys
from functools import partial

import torch
import torch.distributed as dist

from tests.operands import same_bits
from tp_invariant_recipes.numerics.sums import bucket_reduction, symmetric_memory
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import (
    all_gather,
    reduce_scatter_by_slices,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
    tree_sum,
)

TOKENS, FEATURES = 256, 4096  # a slice is 2 MiB at tp=2
SLOW = 30_000_000  # cycles, about 15 ms


def mesh(shards=8):
    return VirtualMesh.from_group(shards, dist.group.WORLD)


def partials(number, shards=8, nodes=1):
    """This rank's nodes of sum `number`, whose magnitudes differ so much that every order has bits of its own."""
    generator = torch.Generator("cuda").manual_seed(1000 * number + dist.get_rank())
    x = torch.randn(nodes, TOKENS, FEATURES, device="cuda", generator=generator)
    return x * torch.pow(2.0, torch.randint(-20, 20, x.shape, device="cuda", generator=generator))


def through_memory(nodes, dtype, by_slices=False):
    if not by_slices:
        started = start_reduce_scatter(nodes, mesh())
    else:
        started = reduce_scatter_by_slices(nodes[0], FEATURES, mesh(), lambda at: nodes[:, at].contiguous())
    assert type(started).__name__ == "PeerSum"
    return started.finished(dtype)


def by_nccl(nodes, dtype):
    return start_all_to_all(tree_sum(nodes), mesh()).finished(dtype)


def sums():
    """Every form has NCCL's bits; what begins while a sum is under way goes by NCCL."""
    for dtype in (torch.float32, torch.bfloat16):
        for nodes in (1, 2, 4):
            x = partials(nodes, nodes=nodes)
            expected = by_nccl(x, dtype)
            for by_slices in (False, True):
                assert same_bits(through_memory(x, dtype, by_slices), expected), (dtype, nodes, by_slices)
    first, second = partials(1), partials(2)
    started = [start_reduce_scatter(x, mesh()) for x in (first, second)]
    assert [type(each).__name__ for each in started] == ["PeerSum", "Moving"]
    results = [each.finished(torch.bfloat16) for each in started]
    assert same_bits(results[0], by_nccl(first, torch.bfloat16))
    assert same_bits(results[1], by_nccl(second, torch.bfloat16))
    return True


def orders_differ():
    """The control: another order of ranks has other bits."""
    x = partials(1)
    group = dist.group.WORLD
    arrived = torch.empty_like(x)
    dist.all_to_all_single(arrived, x, group=group)
    nodes = arrived.view(group.size(), -1)
    in_turn = nodes[0]
    for node in nodes[1:]:
        in_turn = in_turn + node
    return same_bits(in_turn, through_memory(x, torch.float32).view(-1))


def gathers():
    """All ranks' slices, of bytes too, and two at once."""
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        slices = (partials(1)[0] * 2**10).clamp(0, 200).to(dtype)
        expected = slices.new_empty(slices.shape[0] * dist.get_world_size(), FEATURES)
        dist.all_gather_into_tensor(expected, slices)
        assert torch.equal(all_gather(slices, mesh()), expected), dtype
        first = start_all_gather(slices, mesh())
        second = start_all_gather(slices, mesh())
        assert [type(moving.works[0]).__name__ == "PeerGather" for moving in (first, second)] == [True, False]
        assert torch.equal(second.arrived(), first.arrived())
    return True


def exchanges():
    """Gradients of data shards have NCCL's bits, in pieces, with parts of unequal sizes and in a graph, too."""
    bucket_reduction.PIECE = 2**20
    rank, size = dist.get_rank(), dist.get_world_size()
    x = partials(1)[0].view(-1)
    cuts = [0, *(x.numel() * (n + 1) // size - 1000 * (n + 1) for n in range(size - 1)), x.numel()]
    for parts in ([], [*map(slice, cuts, cuts[1:])], [slice(0, 0)] * (size - 1) + [slice(0, x.numel())]):
        mine = (parts or [slice(n * x.numel() // size, (n + 1) * x.numel() // size) for n in range(size)])[rank]
        symmetric_memory.choose("never")
        bucket_reduction.reduce_scatter([expected := x.clone()], dist.group.WORLD, parts=parts)
        symmetric_memory.choose("always")
        bucket_reduction.reduce_scatter([total := x.clone()], dist.group.WORLD, parts=parts)
        assert same_bits(total[mine], expected[mine])
        graph, total = torch.cuda.CUDAGraph(), x.clone()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            bucket_reduction.reduce_scatter([total], dist.group.WORLD, parts=parts)
        for turn in range(3):
            torch.cuda._sleep(SLOW if turn == rank else 0)
            total.copy_(x)
            graph.replay()
        assert same_bits(total[mine], expected[mine])
    (peers,) = symmetric_memory._peers.values()
    assert None not in (peers.sums.handle, peers.gathers.handle)
    return True


def arrivals(waits):
    """Slices that arrive late are read after they have arrived. The control: without waiting they are read before."""
    slices = partials(1)[0]
    expected = slices.new_empty(slices.shape[0] * dist.get_world_size(), FEATURES)
    dist.all_gather_into_tensor(expected, slices)
    all_gather(slices, mesh()).zero_()  # the memory that the next gather gets
    copy, wait = symmetric_memory.Peers.copy, symmetric_memory.Peers.wait

    def slow_copy(peers, to, part):
        with torch.cuda.stream(peers._copying):
            torch.cuda._sleep(SLOW)
        copy(peers, to, part)

    symmetric_memory.Peers.copy = slow_copy
    moving = start_all_gather(slices, mesh())
    symmetric_memory.Peers.wait = wait if waits else lambda *_: None
    read = moving.arrived().clone()
    torch.cuda.synchronize()
    return torch.equal(read, expected)


def graphs():
    """Replays in any order, an odd number of sums in each, and others between."""
    captured = []
    for number in range(3):
        x = partials(number)
        for by_slices in (False, True):
            through_memory(x, torch.bfloat16, by_slices)
        graph, results = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for by_slices in (False, True, False)[: number or 3]:
                gathered = start_all_gather(x[0], mesh())
                results.append(through_memory(x, torch.bfloat16, by_slices))
                results.append(gathered.arrived())
        whole = x.new_empty(dist.get_world_size() * TOKENS, FEATURES)
        dist.all_gather_into_tensor(whole, x[0])
        captured.append((graph, results, by_nccl(x, torch.bfloat16), whole, x))  # which the graph reads
    between = partials(9)
    expected = by_nccl(between, torch.bfloat16)
    for number in (0, 1, 1, 2, 0, 0, 2, 1, 0, 2):
        graph, results, total, whole, _ = captured[number]
        for result in results:
            result.zero_()
        if dist.get_rank() == number % dist.get_world_size():
            torch.cuda._sleep(SLOW // 10)
        graph.replay()
        assert same_bits(through_memory(between, torch.bfloat16), expected)
        for n, result in enumerate(results):
            assert torch.equal(result, whole if n % 2 else total), (number, n)
    return True


def after_another_training():
    """Give back the memory, and form the groups once more, as `tpi audit` does."""
    x = partials(1)
    expected = by_nccl(x, torch.bfloat16)
    for _ in range(3):
        assert same_bits(through_memory(x, torch.bfloat16), expected)
        symmetric_memory.forget()
    return True


def with_barriers(*barriers):
    """Four sums with these barriers of two, each of whose ranks in turn is late to write, then late to read.

    The control: without the first, peers overwrite what a late one reads; without the second, they read too early.
    """
    late = False
    begin, complete = symmetric_memory.Buffer.begin, symmetric_memory.Buffer.complete

    class Handle:
        def __init__(self, handle):
            self.barrier = lambda channel: handle.barrier(channel=channel) if channel in barriers else None

    def slow_begin(buffer, *size):
        handle, buffer.handle = buffer.handle, Handle(buffer.handle)
        views = begin(buffer, *size)
        buffer.handle = handle
        torch.cuda._sleep(SLOW if late else 0)
        return views

    def slow_complete(buffer):
        if 1 in barriers:
            complete(buffer)
        torch.cuda._sleep(SLOW if late else 0)

    xs = [partials(number) for number in range(4)]
    expected = [by_nccl(x, torch.float32) for x in xs]
    through_memory(xs[0], torch.float32)  # the buffer is there
    symmetric_memory.Buffer.begin, symmetric_memory.Buffer.complete = slow_begin, slow_complete
    same = True
    for turn in range(dist.get_world_size()):
        late = turn == dist.get_rank()
        torch.cuda.synchronize()
        dist.barrier()
        results = [through_memory(x, torch.float32) for x in xs]
        same &= all(same_bits(result, total) for result, total in zip(results, expected, strict=True))
    return same


CASES = {f.__name__: f for f in (sums, orders_differ, gathers, exchanges, graphs, after_another_training)} | {
    "both": partial(with_barriers, 0, 1),
    "first": partial(with_barriers, 0),
    "second": partial(with_barriers, 1),
    "late": partial(arrivals, True),
    "early": partial(arrivals, False),
}


def main():
    """Run a case."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    symmetric_memory.choose("always")
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    result = CASES[sys.argv[1]]()
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    if rank == 0:
        print(json.dumps(results), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
