# SPDX-License-Identifier: Apache-2.0
"""A rank of tests/gpu/test_collectives_gpu.py, under torchrun; one GPU is enough for all but the last two kinds:

    python -m torch.distributed.run --nproc-per-node 2 -m tests.gpu.message_ranks

prints one line of JSON on rank 0: what the guard's net says of messages by NCCL, by symmetric memory, and in a graph.
"""

import json
import os
from contextlib import ExitStack
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.distributed.guard_faults import compared
from tp_invariant_recipes.features.guard.collectives import CollectiveNet
from tp_invariant_recipes.kernels.message_digest import add_digests, words
from tp_invariant_recipes.numerics.sums import symmetric_memory
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import start_all_gather, start_all_to_all, start_reduce_scatter
from tp_invariant_recipes.replacement import applied

BIT = 8
SHAPE = (64, 8192)  # 1 MiB of bf16


def gather(mesh):
    x = torch.randn(SHAPE, device="cuda").bfloat16()
    if mesh.size > 1:
        start_all_gather(x, mesh).arrived()
    else:
        dist.all_gather_into_tensor(torch.empty_like(x), x)


def exchange(mesh):
    x = torch.randn(SHAPE, device="cuda")
    if mesh.size > 1:
        start_all_to_all(x, mesh).arrived()
    else:
        dist.all_to_all_single(torch.empty_like(x), x)


def broadcast(mesh):
    dist.broadcast(torch.randn(SHAPE, device="cuda"), 0)


def pieces(mesh):
    start_reduce_scatter(torch.randn(1, *SHAPE, device="cuda"), mesh).finished(torch.bfloat16)


def send(mesh):
    x = torch.randn(SHAPE, device="cuda")
    (dist.isend(x, 1) if mesh.rank == 0 else dist.irecv(x, 0)).wait()


METHODS = {gather: "_allgather_base", exchange: "alltoall_base", broadcast: "broadcast", send: "recv"}


def planted(kind, memory, flag):
    """Flip a bit of what the last rank gets, wherever `flag` is not 0, in graphs too."""
    stack, last = ExitStack(), dist.get_rank() == dist.get_world_size() - 1

    def flip(tensor):
        if last:
            tensor.view(-1)[:2].view(torch.int32).bitwise_xor_(flag)

    if not memory:
        name = METHODS.get(kind, "alltoall_base")
        original = getattr(dist.ProcessGroup, name)

        def method(group, output, *args, **kwargs):
            work = original(group, output, *args, **kwargs)
            if work is not None:
                work.wait()
            flip(output[0] if isinstance(output, list) else output)
            return work

        stack.enter_context(patch.object(dist.ProcessGroup, name, method))
        return stack
    target = symmetric_memory.PeerGather if kind is gather else symmetric_memory.PeerSum
    name = "wait" if kind is gather else "finished"
    arrived = getattr(target, name)

    def spoiled(self, *args):
        peers = self.peers
        if kind is gather:
            peers.wait(self.copied)
            flip(self.whole)
            return arrived(self, *args)
        complete = peers.sums.complete

        def completed():
            complete()
            flip(self.inboxes[peers.rank][0])

        with patch.object(peers.sums, "complete", completed):
            return arrived(self, *args)

    stack.enter_context(patch.object(target, name, spoiled))
    return stack


def said(kind, memory, graph):
    """What the net says of a sound step, of one with a flipped bit, and of a sound one."""
    symmetric_memory.choose("always" if memory else "never")
    mesh = VirtualMesh.from_group(8, dist.group.WORLD)
    flag, findings = torch.zeros((), dtype=torch.int32, device="cuda"), []
    net, gloo = CollectiveNet(1, dist.get_rank()), dist.new_group(backend="gloo")
    with planted(kind, memory, flag), applied(net.replacements()):
        net.start([], torch.device("cuda"))
        replayed = torch.cuda.CUDAGraph() if graph else None
        for number, bit in enumerate((0, 0, BIT, 0)):
            flag.fill_(bit)
            net.step_begins(number)
            if graph and number == 1:
                net.step_ends()
                compared(net, gloo)
                net.step_begins(number)
                with torch.cuda.graph(replayed):
                    kind(mesh)
            if graph and number:
                replayed.replay()
            else:
                kind(mesh)
            net.step_ends()
            finding = compared(net, gloo)
            findings.append(finding and f"{finding.step} {finding.where}")
        net.close()
    return findings


def cost():
    """Microseconds of the digest of so many bytes, and of a copy of them, on the GPU."""
    table, rows = torch.zeros(8, dtype=torch.int64, device="cuda"), {}
    for size in (2**20, 2**24, 2**26, 2**28):
        message = torch.randint(0, 255, (1, size), dtype=torch.uint8, device="cuda")
        other = torch.empty_like(message)
        taken = []
        for call in (lambda m=message: add_digests(words(m), table, 0, 1), lambda m=message, o=other: o.copy_(m)):
            call()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(20):
                    call()
            times = []
            for _ in range(4):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) * 50)
            taken.append(round(min(times), 2))
        rows[size] = taken
    return rows


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    kinds = [(kind, False, graph) for kind in (gather, exchange) for graph in (False, True)]
    if dist.get_world_size() > 1:
        kinds += [(broadcast, False, graph) for graph in (False, True)]
        kinds += [(send, False, False), *((kind, True, graph) for kind in (gather, pieces) for graph in (False, True))]
    results = [(f"{k.__name__} memory={m} graph={g}", said(k, m, g)) for k, m, g in kinds]
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, results)
    if dist.get_rank() == 0:
        assert all(each == results for each in every)
        print(json.dumps({"said": results, "cost": cost()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
