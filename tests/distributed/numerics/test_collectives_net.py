# SPDX-License-Identifier: Apache-2.0
"""What a collective changes in transit is found and named: four Gloo ranks, and a step of messages of each kind."""

import os
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from tests.distributed.guard_faults import Done, InTransit, compared
from tests.distributed.ranks import on_ranks
from tests.operands import same_bits
from tp_invariant_recipes.features.guard.collectives import CollectiveNet, Slot, found
from tp_invariant_recipes.kernels.tree_add import tree_add
from tp_invariant_recipes.numerics.sums import symmetric_memory, tree
from tp_invariant_recipes.replacement import applied

FAULTS = ("flip", "swap", "zeros", "stale")
METHODS = {
    "_allgather_base": "all-gather", "allgather": "all-gather", "allgather_into_tensor_coalesced": "all-gather",
    "alltoall_base": "all-to-all", "alltoall": "all-to-all", "recv": "send", "broadcast": "broadcast",
}  # fmt: skip
RANKS = 4


_exchange = dist.ProcessGroup.alltoall_base


def _alltoall(group, outputs, given, options):
    """As of NCCL, which Gloo lacks."""
    arrived = torch.empty_like(torch.stack(outputs))
    _exchange(group, arrived, torch.stack(given), [], []).wait()
    for output, piece in zip(outputs, arrived, strict=True):
        output.copy_(piece)
    return Done()


def step(mesh, number):
    """The messages of a step, which are the only ones of their kinds; what this rank has received."""
    me, size, group = mesh.rank, mesh.size, dist.group.WORLD

    def data(rank, *shape):
        generator = torch.Generator().manual_seed(100 * number + rank)
        return torch.randn(*shape, generator=generator)

    got = [tree.all_gather(data(me, 3, 700).bfloat16(), mesh)]
    got += [tree.start_reduce_scatter(data(me, 1, 8, 999), mesh).finished(torch.float32)]
    parts = [torch.empty(5) for _ in range(size)]
    dist.all_gather(parts, data(me, 5))
    flats = [torch.empty(4 * size), torch.empty(2 * size)]
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as coalesced:
        for flat in flats:
            dist.all_gather_into_tensor(flat, data(me, len(flat) // size))
    coalesced.wait()
    pieces = [torch.empty(8) for _ in range(size)]
    dist.all_to_all(pieces, [*data(me, size, 8)])
    ahead, behind = torch.empty(6, 7), data(me, 6, 7)
    transfers = [dist.P2POp(dist.isend, behind, (me + 1) % size), dist.P2POp(dist.irecv, ahead, (me - 1) % size)]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    same = data(me, 9)
    dist.broadcast(same, 0)
    return [*got, *parts, *flats, *pieces, ahead, same]


def uneven(mesh, number):
    """As experts exchange their tokens: other numbers of rows for each pair, and none for some."""
    size = mesh.size
    leaving = [(mesh.rank + n) % size * 2 for n in range(size)]
    arriving = [(mesh.rank + n) % size * 2 for n in range(size)]
    generator = torch.Generator().manual_seed(100 * number + mesh.rank)
    tokens, out = torch.randn(sum(leaving), 5, generator=generator), torch.empty(sum(arriving), 5)
    dist.all_to_all_single(out, tokens, arriving, leaving)
    return out


def watched(mesh, faults, share):
    """What the net says of three steps with each fault, or without; and whether the fault changed what a rank got."""
    os.environ["RANK"] = str(mesh.rank)
    results = []
    dist.ProcessGroup.alltoall = _alltoall
    methods = {name: getattr(dist.ProcessGroup, name) for name in METHODS}
    for fault in faults:
        now = fault.plant() if fault else SimpleNamespace()
        net = CollectiveNet(share or 1, mesh.rank)
        said, got = [], []
        with applied(net.replacements() if share else ()):
            net.start([], torch.device("cpu"))
            for now.step in (1, 2, 3):
                net.step_begins(now.step)
                got += [*step(mesh, now.step), uneven(mesh, now.step)]
                net.step_ends()
                said += [compared(net)]
            net.close()
        for name, method in methods.items():
            setattr(dist.ProcessGroup, name, method)
        results.append((said, got))
    return [(said, not all(map(same_bits, got, results[0][1]))) for said, got in results]


CALLS = (*((method, 0) for method in METHODS), ("alltoall_base", 1))
ALL = [None, *(InTransit(method, fault, number=n) for (method, n), fault in product(CALLS, FAULTS))]


def test_each_corrupted_message_is_found_in_its_step_and_named():
    """32 faults. The run without one comes first."""
    for rank, results in enumerate(on_ranks(RANKS, RANKS, watched, ALL, 1)):
        assert results[0][0] == [None, None, None]
        for fault, (said, changed) in zip(ALL[1:], results[1:], strict=True):
            assert said[0] is said[2] is None, fault
            finding = said[1]
            assert finding is not None, (rank, fault)
            assert (finding.step, finding.where.split()[0]) == (2, METHODS[fault.method]), fault
            assert 1 in finding.ranks, (fault, finding)
            assert finding.where.endswith("received otherwise by 1"), (fault, finding)
            assert changed is (rank == 1), fault


def test_without_the_net_nobody_says_a_word():
    """The control: one rank computes with other numbers."""
    results = on_ranks(RANKS, RANKS, watched, ALL[:5], None)
    for rank, of_rank in enumerate(results):
        assert all(said == [None] * 3 for said, _ in of_rank)
        assert [changed for _, changed in of_rank[1:]] == [rank == 1] * 4


def test_ranks_may_name_other_modules():
    """Which is no fault, and hides none."""
    pairs = (("all-gather", (0, 1), " in a", " in b", 7, 7), ("send", (0, 1), "", "", 5, 6))
    sent = [(Slot(name, ranks, 0, (1,), here, True), there) for name, ranks, here, _, there, _ in pairs]
    received = [(Slot(name, ranks, 0, (1,), here, False), there) for name, ranks, _, here, _, there in pairs]
    assert found(3, [sent[:1], received[:1]]) is None
    finding = found(3, [sent, received])
    assert finding.details["unlike"] == ["send over ranks 0, 1: sent by 0, received otherwise by 1"]
    assert (finding.step, finding.ranks) == (3, (0, 1))


def test_a_step_may_end_before_a_message_is_waited_for():
    """Gloo would wait for ever for a message that was waited for."""
    waits = Mock()
    net = CollectiveNet(1, 0)
    net._table = torch.zeros(8, dtype=torch.int64)
    net.step_begins(1)
    net._groups["group"] = (1, 0)
    transfer = net.begin("send", "group", (0, 1))
    work = net.issued(waits, "group", [partial(transfer.received, torch.ones(1, 3), 0)])
    net.step_ends()
    assert (waits.wait.call_count, int(net._last[1].any())) == (1, 1)
    assert work.wait()
    assert waits.wait.call_count == 1


def many(mesh, steps, share):
    """How many messages of sound steps are digested, and what the net says."""
    net = CollectiveNet(share, mesh.rank)
    said = []
    with applied(net.replacements()):
        net.start([], torch.device("cpu"))
        for number in range(steps):
            net.step_begins(number)
            for _ in range(8):
                tree.all_gather(torch.randn(40) * number, mesh)
            net.step_ends()
            said += [compared(net)]
        net.close()
    return net.messages, {finding and finding.where for finding in said}


@pytest.mark.parametrize("share, messages", (pytest.param(1, 24, marks=pytest.mark.release), (8, 3)))
def test_sound_steps_raise_no_alarm(share, messages):
    steps = 1000 if share == 1 else 50
    assert on_ranks(2, 2, many, steps, share) == [(steps * messages, {None})] * 2


class Memory(symmetric_memory.Peers):
    """A rank whose peers' memory is that of this process; copies are done as late as they may be."""

    def __init__(self, net, rank, memory, copies):
        self.group, self.rank, self.size, self.device = net, rank, len(memory), torch.device("cpu")
        net._groups[self.group] = tuple(range(self.size))
        self.copies, kind = copies, SimpleNamespace(complete=lambda: None)
        self.sums = self.gathers = kind
        kind.begin = lambda size, dtype: [each[:size].view(dtype) for each in memory]

    def copy(self, to, part):
        self.copies.append((to, part))

    def copied(self):
        return None

    def wait(self, event):
        for to, part in self.copies:
            to.copy_(part)


@pytest.mark.parametrize("fault", (None, *FAULTS))
@pytest.mark.parametrize("kind", ("all-gather", "reduce-scatter"))
def test_copies_over_symmetric_memory_are_digested(kind, fault, monkeypatch):
    """Four ranks in step; the fault is in what rank 1 gets. Another 8 faults."""
    monkeypatch.setattr(symmetric_memory, "listener", [lambda operation, net: net.begin(operation, net)])
    monkeypatch.setattr(symmetric_memory, "peer_add", lambda inbox, out: tree_add(torch.stack(inbox)[None], out[None]))
    nets, said, before = [CollectiveNet(1, rank) for rank in range(RANKS)], [], []
    for net in nets:
        net._table = torch.zeros(1 << 10, dtype=torch.int64)
    for number in (1, 2):
        memory, copies = [torch.zeros(4096) for _ in range(RANKS)], []
        data = [
            torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * number + rank)) for rank in range(RANKS)
        ]
        ranks = [Memory(net, rank, memory, copies) for rank, net in enumerate(nets)]
        for net in nets:
            net.step_begins(number)
        if kind == "all-gather":
            works = [rank.start_gather(part) for rank, part in zip(ranks, data, strict=True)]
            pieces = [*works[1].whole.view(RANKS, -1)]
        else:
            works = [rank.begin_sum((8, 24)) for rank in ranks]
            for started, node in zip(works, data, strict=True):
                for peer in started.peers.order():
                    started.send(peer, node[started.rows(peer)])
            pieces = [*works[1].inboxes[1]]
        ranks[0].wait(None)
        if fault and number == 2:
            InTransit("", fault)._spoil(pieces, before)
        before = [piece.clone() for piece in pieces]
        copies.clear()
        for work in works:
            work.wait() if kind == "all-gather" else work.finished(torch.float32)
        for net in nets:
            net.step_ends()
        said += [found(number, [list(zip(net._slots, net._last[1].tolist(), strict=False)) for net in nets])]
    assert said[0] is None
    assert (said[1] is None) is (fault is None)
    if fault:
        assert said[1].where.startswith(f"{kind} over symmetric memory over ranks 0, 1, 2, 3: sent by ")
        assert said[1].where.endswith("received otherwise by 1")
