# SPDX-License-Identifier: Apache-2.0
"""Sums and gathers over tensor- or data-parallel ranks of one host through symmetric memory (torch's symmetric memory).

Copy engines push a rank's slices of its node into its peers' inboxes while a GEMM computes the next slice, or other
work runs; then each rank adds its inbox in tree order, with the bits of numerics/sums/tree.py's exchange by NCCL:

    barrier      the peers have read their inboxes of the use before
    push         slice r of the node to rank r, own ones stay
    barrier      all slices have arrived
    add          kernels/tree_add.py

Copy engines pull the slices of a gather out of the peers' buffers:

    barrier      the peers have pulled this rank's slice of the use before
    copy         this rank's slice into its buffer
    barrier      all slices are in their buffers
    pull         each peer's slice in turn
    copy         this rank's slice, on the stream that goes on: with CUDA_DEVICE_MAX_CONNECTIONS=1 a kernel that
                 followed the copy engines would hold up others

Both barriers wait on the stream, and nothing else orders one use of the memory and the next, so that CUDA graphs may be
replayed in any order. A group has one buffer for sums; what begins while another sum is in it goes by NCCL.

With `device.peer_memory=auto` an exactness check at a group's first use decides: ranks on several hosts or without
access to each other, GPUs that another process uses, and other bits than by NCCL leave it to NCCL. So does a shape
that a CUDA graph's capture meets first. On a shared GPU a barrier takes several of the driver's time slices, and a
step minutes.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.kernels.tree_add import peer_add, tree_add
from tp_invariant_recipes.machine import gpus

KEY = "device.peer_memory"
SLOWEST = 1.0  # ms for a barrier; some 0.01 where no other process uses the GPUs
TENSOR, DATA = "tensor", "data"  # kinds of groups
LEAST = 2**20  # bytes that a rank reads of another; of less, barriers take as long as NCCL
_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"  # else torch asks the driver for it
_numbers = count()  # of buffers, so that each has a name of its own


class Buffer:
    """Symmetric memory of a group's ranks, for one use at a time. It grows, and keeps what graphs may refer to."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.busy = False
        self.handle: Any = None
        self._size = 0
        self._kept: list[Any] = []
        self._views: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def begin(self, size: int, dtype: torch.dtype) -> list[Tensor] | None:
        """Return each rank's buffer, [size] of `dtype`, in rank order, when the peers have read what this one held.

        None: it is in use, or a CUDA graph is being captured and it is too small. A collective.
        """
        views = self._views.get((size, dtype))
        if self.busy or (views is None and size * dtype.itemsize > self._size and not self._grow(size, dtype)):
            return None
        if views is None:
            views = [self.handle.get_buffer(rank, (size,), dtype) for rank in range(self.group.size())]
            self._views[size, dtype] = views
        self.busy = True
        self.handle.barrier(channel=0)
        return views

    def complete(self) -> None:
        """Wait on the stream until every rank has written."""
        self.handle.barrier(channel=1)

    def _grow(self, size: int, dtype: torch.dtype) -> bool:
        if torch.cuda.is_current_stream_capturing():
            return False
        self._size = -(-size * dtype.itemsize // 2**21) * 2**21
        memory, self.handle = _allocated(self._size, self.group, self.device)
        self._views = {}
        self._kept += [memory, self.handle]
        return True


def _allocated(size: int, group: Any, device: torch.device) -> tuple[Tensor, Any]:
    """Return so many bytes of symmetric memory, and torch's handle of it. A collective.

    torch remembers the store of a group's name, which a group of a later training may have, too.
    """
    from torch._C._distributed_c10d import _register_process_group
    from torch.distributed import _symmetric_memory as symmetric
    from torch.distributed import distributed_c10d

    before = os.environ.get(_MULTICAST)
    os.environ[_MULTICAST] = "1"
    try:
        name = distributed_c10d.GroupName(f"tpi-{next(_numbers)}")
        _register_process_group(name, group)
        memory = symmetric._SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
        return memory, symmetric.rendezvous(memory, name)
    finally:
        if before is None:
            del os.environ[_MULTICAST]
        else:
            os.environ[_MULTICAST] = before


class Peers:
    """A group's ranks that can read symmetric memory."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.size = group.rank(), group.size()
        self.sums, self.gathers = Buffer(group, device), Buffer(group, device)
        self._copying = torch.cuda.Stream(device)  # of the copy engines

    def begin_sum(self, shape: Sequence[int]) -> "PeerSum | None":
        """Return a sum of nodes [tokens, …]; None: NCCL is to make it."""
        views = None if shape[0] % self.size else self.sums.begin(math.prod(shape), torch.float32)
        if views is None:
            return None
        transfer = self.transfer("reduce-scatter over symmetric memory")
        return PeerSum(self, [view.view(self.size, -1) for view in views], tuple(shape), transfer)

    def start_gather(self, slices: Tensor) -> "PeerGather | None":
        """Start concatenating slices, as numerics/sums/tree.py's `start_all_gather`. None: NCCL is to do it."""
        views = self.gathers.begin(slices.numel(), slices.dtype)
        if views is None:
            return None
        views[self.rank].copy_(slices.reshape(-1))
        self.gathers.complete()
        whole = slices.new_empty(self.size * slices.shape[0], *slices.shape[1:])
        for peer in [*self.order()][:-1]:
            self.copy(whole.view(self.size, -1)[peer], views[peer])
        copied, transfer = self.copied(), self.transfer("all-gather over symmetric memory")
        whole.view(self.size, -1)[self.rank].copy_(slices.reshape(-1))
        if transfer is not None:
            transfer.sent(slices[None])
        return PeerGather(self, whole, copied, transfer)

    def start_exchange(self, rows: Sequence[Tensor]) -> "PeerExchange | None":
        """Start sending every rank its row, fp32 without gaps, of that rank's size. None: NCCL is to do it.

        The copies stay on the current stream: a CUDA graph has a branch for each stream that they leave for, and
        branches that share one of the GPU's queues wait for each other.
        """
        buffer = next((buffer for buffer in (self.sums, self.gathers) if not buffer.busy), None)
        views = buffer and not listener and buffer.begin(self.size * max(map(len, rows)), torch.float32)
        if not buffer or not views:
            return None
        for peer in self.order():
            inbox = views[peer][: self.size * len(rows[peer])].view(self.size, len(rows[peer]))
            inbox[self.rank].copy_(rows[peer])
        return PeerExchange(buffer, inbox)  # of this rank, the last

    def transfer(self, operation: str) -> Any:
        """Return what digests the messages of a collective (features/guard/collectives.py); None: nothing does."""
        return listener[0](operation, self.group) if listener else None

    def order(self) -> Iterator[int]:
        """Yield all ranks, this one last; every rank begins with another one."""
        for step in range(1, self.size + 1):
            yield (self.rank + step) % self.size

    def copy(self, to: Tensor, part: Tensor) -> None:
        """Start copying a part that is complete on the current stream."""
        self._copying.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copying):
            to.copy_(part)

    def copied(self) -> Any:
        """Return the event that ends all copies so far."""
        return self._copying.record_event()

    def wait(self, event: Any) -> None:
        """Have the current stream wait for copies."""
        torch.cuda.current_stream(self.device).wait_event(event)


@dataclass
class PeerSum:
    """A sum over ranks. Each slice of the node is sent as soon as it is computed, in the order of `Peers.order`.

    inboxes: of each rank, [t, tokens/t · …] fp32: row r is what rank r sends. shape: of a node.
    parts:   what this rank has computed, by rank, until it is sent.
    """

    peers: Peers
    inboxes: list[Tensor]
    shape: tuple[int, ...]
    transfer: Any = None
    parts: dict[int, Tensor] = field(default_factory=dict)

    def rows(self, peer: int) -> slice:
        """Return the rows of the node that a rank gets."""
        each = self.shape[0] // self.peers.size
        return slice(peer * each, (peer + 1) * each)

    def send(self, peer: int, part: Tensor) -> None:
        """Send a rank its rows, [tokens/t, …] fp32 without gaps."""
        self.parts[peer] = part.reshape(-1)
        if peer != self.peers.rank:
            self.peers.copy(self.inboxes[peer][self.peers.rank], self.parts[peer])
            if self.transfer is not None:
                self.transfer.sent(self.parts[peer][None], peer)

    def finished(self, dtype: torch.dtype) -> Tensor:
        """[tokens/t, …] of `dtype`."""
        peers = self.peers
        peers.wait(peers.copied())
        peers.sums.complete()
        rows, own = self.inboxes[peers.rank], peers.rank
        if self.transfer is not None:
            self.transfer.received(rows[:own], 0)
            self.transfer.received(rows[own + 1 :], own + 1)
        inbox = [*rows]
        inbox[peers.rank] = self.parts[peers.rank]
        out = torch.empty(self.shape[0] // peers.size, *self.shape[1:], dtype=dtype, device=peers.device)
        peer_add(inbox, out.view(-1))
        peers.sums.busy = False
        return out


@dataclass
class PeerExchange:
    """Rows on their way to all ranks. inbox: [t, m] of this rank, row r of rank r."""

    buffer: Buffer
    inbox: Tensor

    def wait(self) -> None:
        """Have the stream wait for the inbox, which is to be read on it before the next exchange starts."""
        self.buffer.complete()
        self.buffer.busy = False


@dataclass
class PeerGather:
    """A gather on its way. whole: all ranks' slices. copied: the event that ends the peers'."""

    peers: Peers
    whole: Tensor
    copied: Any
    transfer: Any = None

    def wait(self) -> None:
        """Have the stream wait for it."""
        self.peers.wait(self.copied)
        if self.transfer is not None:
            self.transfer.received(self.whole.view(self.peers.size, -1), 0)
        self.peers.gathers.busy = False


_peers: dict[Any, Peers | None] = {}  # by process group
_choice: list[str] = ["never"]  # of this process, until a run chooses
listener: list[Callable[[str, Any], Any]] = []  # one at most: of an operation and a group what digests its messages


def peers_of(group: Any, operand: Tensor, size: int, parallel: str = TENSOR) -> Peers | None:
    """Return the group's ranks, if they are to read so many bytes of symmetric memory.

    The first call for a group is a collective. Raises RunError: device.peer_memory=always, and tensor-parallel ranks
    cannot.
    """
    choice = _choice[0]
    if group is None or not operand.is_cuda or choice == "never" or (size < LEAST and choice == "auto"):
        return None
    if group not in _peers:
        if torch.cuda.is_current_stream_capturing():
            return None
        _peers[group] = _tried(group, operand.device, parallel)
    return _peers[group]


def forget() -> None:
    """Give back the memory of all groups, which end with a training."""
    _peers.clear()


def choose(choice: str) -> None:
    """Have this process follow a value of device.peer_memory."""
    _choice[0] = choice


def _tried(group: Any, device: torch.device, parallel: str = TENSOR) -> Peers | None:
    """Return the group's peers after an exactness check on which all ranks agree, and print its result."""
    problem, peers = _unsuitable(group, device), None
    if problem is None:
        try:
            peers = Peers(group, device)
            problem = _slow(peers) if _trial(peers) else "sums are not bitwise identical"
        except RuntimeError as error:
            problem = str(error).strip().partition("\n")[0] or repr(error)
        if not _everywhere(problem is None, group, device):
            problem = problem or "another rank cannot"
    if problem is not None and _choice[0] == "always" and parallel == TENSOR:
        raise RunError(f"{KEY}=always: symmetric memory is not available: {problem}")
    if group.rank() == 0:
        how = "their memory" if problem is None else f"NCCL: {problem}"
        print(f"sums over {group.size()} {parallel}-parallel ranks go through {how}", flush=True)
    return peers if problem is None else None


def _unsuitable(group: Any, device: torch.device) -> str | None:
    """Return why a group's symmetric memory is not available, the same on every rank; None: they may."""
    if group.size() not in gpus.PEERS or dist.get_backend(group) != "nccl":
        return f"{group.size()} ranks over {dist.get_backend(group)}"
    return _hosts_problem(group, device)


def _hosts_problem(group: Any, device: torch.device) -> str | None:
    """Return what is wrong with where the ranks are; None: nothing. A collective."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    shared = _choice[0] == "auto" and gpus.processes(f"GPU-{uuid}") > 1
    here = boot, os.readlink("/proc/self/ns/mnt"), uuid, shared
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, here, group=group)
    if len({place[:2] for place in every}) > 1:
        return "ranks on several hosts or in several containers"
    if any(place[3] for place in every):
        return "another process uses a GPU of these ranks"
    return None if len({place[2] for place in every}) == len(every) else "ranks share a GPU"


def _everywhere(fine: bool, group: Any, device: torch.device) -> bool:
    agreed = torch.tensor(int(fine), dtype=torch.int32, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
    return bool(agreed.item())


def _slow(peers: Peers) -> str | None:
    """Return why these ranks wait too long for each other, with `auto`; None: they do not."""
    times = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(32):
            peers.sums.handle.barrier(channel=0)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 32)
    slow = _choice[0] == "auto" and min(times) > SLOWEST
    return f"a barrier takes {min(times):.1f} ms, as on shared GPUs" if slow else None


def _trial(peers: Peers) -> bool:
    """Whether sums and gathers have NCCL's bits, each three times, of numbers that cancel."""
    size, device = peers.size, peers.device
    generator = torch.Generator(device).manual_seed(peers.rank)
    agrees = True
    for _ in range(3):
        node = torch.randn(16 * size, 2**14, device=device, generator=generator)
        node *= torch.pow(2.0, torch.randint(-20, 20, node.shape, device=device, generator=generator))
        arrived = torch.empty_like(node)
        dist.all_to_all_single(arrived, node, group=peers.group)
        expected = tree_add(arrived.view(size, -1), torch.empty(arrived.numel() // size, device=device))
        whole = torch.empty(size, expected.numel(), device=device)
        dist.all_gather_into_tensor(whole, expected, group=peers.group)
        started, gather = peers.begin_sum(node.shape), peers.start_gather(expected[None])
        assert started is not None
        assert gather is not None
        for peer in peers.order():
            started.send(peer, node[started.rows(peer)])
        gather.wait()
        total = started.finished(torch.float32).view(-1)
        agrees &= torch.equal(total, expected) and torch.equal(gather.whole, whole)
    return agrees
