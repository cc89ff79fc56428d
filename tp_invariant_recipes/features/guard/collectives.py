# SPDX-License-Identifier: Apache-2.0
"""What ranks send and what they receive, by digests: NCCL, Gloo and symmetric memory check nothing end to end.

Under tree and portable collectives move bytes, and add nothing. So for each pair of ranks the digests of what one has
sent and of what the other has received are equal (kernels/message_digest.py).

    a collective is issued     the sender digests each message; the receiver does as soon as it has waited for it
    a step ends                a rank multiplies the digests of each pair by a number of the pair, and adds up those
                               sent less those received
    the next step's passes     one number is added over all ranks by Gloo, on the host. It is 0, or the ranks exchange
    are launched               their tables, which name the pair and the module

All of it goes through methods of torch's ProcessGroup, and two of numerics/sums/symmetric_memory.py. The all-reduces of
maxima, counts and exact sums are not covered.
"""

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.module import GraphableMegatronModule
from torch import Tensor

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.features.guard.judge import SilentDataCorruption, launched, pinned
from tp_invariant_recipes.function_modes import outside_modes
from tp_invariant_recipes.kernels.message_digest import add_digests, words
from tp_invariant_recipes.ledger import evidence
from tp_invariant_recipes.numerics.sums import symmetric_memory
from tp_invariant_recipes.observe.module_hooks import named_modules
from tp_invariant_recipes.observe.shards import unwrapped
from tp_invariant_recipes.replacement import Replacement

SHARES = {"sampled": 8, "all": 1}  # guard.collectives -> one of so many messages is digested, another one in each step
SLOTS = 1 << 20  # of a rank's table, which cannot grow once a CUDA graph adds to it
WHY = "NCCL and Gloo do not check what they have moved"
Rows = tuple[Tensor, int]
Takes = list[Callable[[], None]]


class Slot(NamedTuple):
    """A number of a rank's table: the digests of what one rank has sent to others, or received of it."""

    operation: str
    ranks: tuple[int, ...]
    source: int
    targets: tuple[int, ...]
    where: str
    is_sent: bool

    def weight(self) -> int:
        """Return the number of its pairs, as int64."""
        total = sum(_number_of(self.operation, self.ranks, self.source, target) for target in self.targets)
        return ((total if self.is_sent else -total) + 2**63) % 2**64 - 2**63


class Transfer:
    """A collective, or a message between two ranks. ranks: of its group, in order. number: in the step."""

    def __init__(self, net: "CollectiveNet", operation: str, ranks: tuple[int, ...], number: int, where: str) -> None:
        self._net, self._key, self._number = net, (operation, ranks, where), number

    def sent(self, rows: Tensor, first: int | None = None) -> None:
        """Digest what this rank sends: row i to rank number first + i of the group; None: one row to all."""
        to = "all" if first is None else "each"
        self._net.add(rows, (*self._key, to), first or 0, self._number)

    def received(self, rows: Tensor, first: int) -> None:
        """Digest what this rank has received: row i of rank number first + i of the group."""
        self._net.add(rows, (*self._key, "received"), first, self._number)


class Message(NamedTuple):
    """The messages of a collective to and from a rank: rows, with the number in the group of the first's rank.

    Without a number all ranks get the same row. between: two ranks of the group; none: it is of all.
    """

    operation: str
    sent: Sequence[tuple[Tensor, int | None]]
    received: Sequence[Rows]
    between: tuple[int, ...] = ()


class Arriving:
    """A Work of torch, whose messages are digested once it has been waited for."""

    def __init__(self, work: Any, takes: Takes) -> None:
        self._work, self.takes = work, takes

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """As of torch's Work."""
        if not self.takes and not torch.cuda.is_initialized():
            return True  # Gloo can wait for a message but once
        result = self._work.wait(*args, **kwargs) if self._work is not None else None
        takes, self.takes = self.takes, []  # and keep the messages no longer
        for take in takes:
            take()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class CollectiveNet:
    """The digests of one rank. share: as of SHARES."""

    def __init__(self, share: int, rank: int) -> None:
        self.share, self.rank = share, rank
        self.messages = 0
        self._counts: Counter[tuple[str, tuple[int, ...], Any]] = Counter()
        self._step: int | None = None
        self._groups: dict[Any, tuple[int, ...]] = {}
        self._slots: list[Slot] = []
        self._first: dict[tuple[Any, ...], int] = {}
        self._weights = torch.zeros(0, dtype=torch.int64)
        self._pending: list[Arriving] = []
        self._coalescing: dict[Any, Takes] = {}
        self._streams: set[Any] = set()
        self._modules = _Modules()
        self._last: tuple[int, Tensor, Tensor, Any] | None = None

    def replacements(self) -> Iterator[Replacement]:
        """Yield what the net replaces for the time of training."""
        rows = {name: partial(self._method, messages=messages) for name, messages in _MESSAGES.items()}
        rows |= {f"_{at}_coalescing": partial(self._coalescing_method, begins=at == "start") for at in ("start", "end")}
        return (Replacement(f"torch.distributed:ProcessGroup.{name}", make, WHY) for name, make in rows.items())

    def start(self, model: Sequence[Any], device: torch.device) -> None:
        """Before the first step, on all ranks."""
        self._table = torch.zeros(SLOTS, dtype=torch.int64, device=device)
        self._modules.hook(model)
        symmetric_memory.listener[:] = [self.begin]

    def close(self) -> None:
        """Watch no longer."""
        self._step = None
        self._modules.unhook()
        symmetric_memory.listener.clear()

    def step_begins(self, step: int) -> None:
        """Count messages from here on, until the step ends: between steps threads may write checkpoints."""
        self._step = step
        self._counts.clear()
        self._modules.stack.clear()

    @outside_modes
    def step_ends(self) -> None:
        """Add up the table; the host does not wait for it."""
        pending, self._pending = self._pending, []
        for work in pending:
            if work.takes:
                work.wait()
        step, self._step = self._step, None
        if step is None:
            return
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)
        self._streams.clear()
        table = self._table[: len(self._slots)]
        if len(self._weights) < len(table):
            self._weights = torch.tensor([slot.weight() for slot in self._slots], device=table.device)
        held = table.clone()
        table.zero_()
        total = (held * self._weights).sum()
        self._last = step, held, pinned(total) if total.is_cuda else total, launched()

    def unbalanced(self) -> int:
        """Return this rank's number of the step that ended last: over all ranks they add up to 0, modulo 2^64."""
        if self._last is None:
            return 0
        _, _, total, done = self._last
        if done is not None:
            done.synchronize()
        return int(total)

    def unlike(self, group: Any) -> SilentDataCorruption | None:
        """Compare what ranks have sent and received in that step. A collective of all ranks. group: Gloo's."""
        assert self._last is not None
        step, held, *_ = self._last
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, list(zip(self._slots, held.tolist(), strict=False)), group=group)
        return found(step, everyone)

    def begin(self, operation: str, group: Any, between: Sequence[int] = ()) -> Transfer | None:
        """Return what takes the digests of a collective that begins now; None: it is not sampled.

        between: which two ranks of the group, of a message.
        """
        if self._step is None:
            return None
        if group not in self._groups:
            self._groups[group] = tuple(dist.get_process_group_ranks(group))
        ranks = tuple(self._groups[group][n] for n in between) or self._groups[group]
        number = self._counts[operation, ranks, group]
        self._counts[operation, ranks, group] += 1
        if (number + self._step) % self.share:
            return None
        return Transfer(self, operation, ranks, number, self._modules.where())

    @outside_modes
    def add(self, rows: Tensor, key: tuple[str, tuple[int, ...], str, str], first: int, number: int) -> None:
        """Add the digests of rows to slots of a key, beginning with slot number `first` of these."""
        if key not in self._first:
            self._first[key] = len(self._slots)
            operation, ranks, where, which = key
            if which == "received":
                self._slots += [Slot(operation, ranks, rank, (self.rank,), where, False) for rank in ranks]
            else:
                targets = [ranks] if which == "all" else [(rank,) for rank in ranks]
                self._slots += [Slot(operation, ranks, self.rank, to, where, True) for to in targets]
            if len(self._slots) > SLOTS:
                raise RunError(f"guard.collectives: {SLOTS} pairs of ranks and modules; guard.collectives=off")
        if rows.is_cuda:
            self._streams |= set() if torch.cuda.is_current_stream_capturing() else {torch.cuda.current_stream()}
        self.messages += len(rows)
        add_digests(words(rows), self._table, self._first[key] + first, number)

    def issued(self, work: Any, group: Any, arriving: Takes) -> Any:
        """Return what stands for a Work. arriving: what to digest once it has been waited for."""
        if group in self._coalescing:
            self._coalescing[group] += arriving
        elif arriving:
            arrives = Arriving(work, arriving)
            if work is not None:
                self._pending.append(arrives)
                return arrives
            arrives.wait()  # the current stream waits for it
        return work

    def _method(self, original: Callable[..., Any], messages: Callable[..., list[Message]]) -> Callable[..., Any]:
        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            work = original(group, *args, **kwargs)
            arriving: Takes = []
            for message in messages(group, *args) if self._step is not None else ():
                transfer = self.begin(message.operation, group, message.between)
                if transfer is not None:
                    for rows, first in message.sent:
                        transfer.sent(rows, first)
                    arriving += [partial(transfer.received, *received) for received in message.received]
            return self.issued(work, group, arriving)

        return method

    def _coalescing_method(self, original: Callable[..., Any], *, begins: bool) -> Callable[..., Any]:
        def method(group: Any, *args: Any) -> Any:
            if begins:
                self._coalescing[group] = []
            work = original(group, *args)
            return work if begins else self.issued(work, group, self._coalescing.pop(group))

        return method


class _Modules:
    """Which module runs, by hooks: the innermost; in a backward pass, the one whose output had its gradient last."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self._backward = ""
        self._handles: list[Any] = []

    def where(self) -> str:
        """Return it in words; "": none."""
        if self.stack:
            return f" in the forward pass of {self.stack[-1]}"
        return f" in the backward pass of {self._backward}" if torch._C._current_graph_task_id() != -1 else ""

    def hook(self, model: Sequence[Any]) -> None:
        for name, module in (pair for chunk in model for pair in named_modules(unwrapped(chunk))):
            if not isinstance(module, GraphableMegatronModule):  # Transformer Engine captures no module with hooks
                self._handles.append(module.register_forward_pre_hook(partial(self._enter, name)))
                self._handles.append(module.register_forward_hook(partial(self._leave, name)))

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, name: str, module: Any, inputs: Any) -> None:
        self.stack.append(name)

    def _leave(self, name: str, module: Any, inputs: Any, outputs: Any) -> None:
        del self.stack[-1:]
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if isinstance(output, Tensor) and output.requires_grad and not hasattr(output, "made_by"):
                output.made_by = name  # type: ignore[attr-defined]  # of a module and the last one in it, the last one
                output.register_hook(partial(self._arrived, name))

    def _arrived(self, name: str, gradient: Tensor) -> None:
        self._backward = name


def found(step: int, everyone: Iterable[list[tuple[Slot, int]]]) -> SilentDataCorruption | None:
    """Return the first message that arrived as another one. everyone: each rank's table, in order of first use."""
    totals: Counter[tuple[str, tuple[int, ...], int, int, str]] = Counter()
    pairs: Counter[tuple[Any, ...]] = Counter()  # ranks may differ in which module they name
    order: dict[tuple[Any, ...], int] = {}
    for table in everyone:
        for place, (slot, value) in enumerate(table):
            for target in slot.targets:
                pair = slot.operation, slot.ranks, slot.source, target
                totals[*pair, slot.where] += (change := value if slot.is_sent else -value)
                pairs[pair] += change
                if not slot.is_sent:
                    order[*pair, slot.where] = place
    unlike = sorted(
        (order.get(key, SLOTS), key) for key, total in totals.items() if total % 2**64 and pairs[key[:-1]] % 2**64
    )
    if not unlike:
        return None  # of the host's network, not of these messages
    shown = []
    for _, (operation, ranks, source, target, where) in unlike:
        group = f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= 8 else f"{len(ranks)} ranks"
        shown.append(f"{operation} over {group}{where}: sent by {source}, received otherwise by {target}")
    _, _, source, target, _ = unlike[0][1]
    suspects = tuple(sorted({source, target}))
    return SilentDataCorruption(evidence.COLLECTIVES, step, shown[0], suspects, details={"unlike": shown})


@functools.cache
def _number_of(*pair: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(pair).encode(), digest_size=8).digest(), "little") | 1


def _gathers(group: Any, outputs: Sequence[Tensor], given: Sequence[Tensor], *_: Any) -> list[Message]:
    pairs = zip(outputs, given, strict=True)
    return [Message("all-gather", [(x[None], None)], [(out.view(group.size(), -1), 0)]) for out, x in pairs]


def _exchange(
    group: Any, output: Tensor, given: Tensor, arriving: list[int], leaving: list[int], *_: Any
) -> list[Message]:
    def rows(whole: Tensor, sizes: list[int]) -> Sequence[Rows]:
        return _each(whole.split(sizes)) if sizes else [(whole.view(group.size(), -1), 0)]

    return [Message("all-to-all", rows(given, leaving), rows(output, arriving))]


def _each(pieces: Sequence[Tensor]) -> Sequence[Rows]:
    return [(piece[None], n) for n, piece in enumerate(pieces)]


def _broadcast(group: Any, tensors: list[Tensor], options: Any, *_: Any) -> list[Message]:
    row, root = tensors[0][None], options.rootRank
    return [Message("broadcast", [(row, None)] if group.rank() == root else [], [(row, root)])]


# Methods of torch's ProcessGroup -> the messages of a call.
_MESSAGES: dict[str, Callable[..., list[Message]]] = {
    "_allgather_base": lambda group, output, given, *_: _gathers(group, [output], [given]),
    "allgather_into_tensor_coalesced": _gathers,
    "allgather": lambda group, outputs, given, *_: [Message("all-gather", [(given[0][None], None)], _each(outputs[0]))],
    "alltoall_base": _exchange,
    "alltoall": lambda group, outputs, given, *_: [Message("all-to-all", _each(given), _each(outputs))],
    "broadcast": _broadcast,
    "send": lambda group, sent, target, *_: [Message("send", [(sent[0][None], 1)], [], (group.rank(), target))],
    "recv": lambda group, got, source, *_: [Message("send", [], [(got[0][None], 0)], (source, group.rank()))],
}
