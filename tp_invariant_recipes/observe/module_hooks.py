# SPDX-License-Identifier: Apache-2.0
"""One rank's view of a traced step: hooks on every module that take lanes of what goes in and out, both ways.

Nothing is put into the autograd graph: outputs are watched by hooks on the tensors, and the gradient that a module
sends to its input by hooks on those nodes of its own graph that send it. So where several modules read one tensor (a
residual connection) each has its own contribution recorded, not their sum.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from torch import Tensor

from tp_invariant_recipes.kernels.digest import LANES, lanes
from tp_invariant_recipes.kernels.launch import TablePlace
from tp_invariant_recipes.observe.dump_writer import DumpWriter
from tp_invariant_recipes.observe.placement import NOTHING, ModuleRow, PlacementRule, Site, class_names, row_of

ROOT = "model"  # the name of the whole model among its modules
EMBEDDING = "embedding"
FORWARD, BACKWARD = "forward", "backward"

_NO_LANES = torch.zeros(LANES, dtype=torch.int64)


class Key(NamedTuple):
    """A tensor of a rank's trace. stage: which part of the model, in the order of the forward pass."""

    stage: int
    direction: str
    module: str
    tensor: str


class Seen(NamedTuple):
    """What a rank has of a tensor, over its micro-batches. places: None: the tensor has no place."""

    key: Key
    dtype: str
    shape: tuple[int, ...]
    places: tuple[TablePlace, ...] | None
    lanes: list[int]


@dataclass
class _Entry:
    dtype: str
    shape: tuple[int, ...] = ()
    places: list[TablePlace] = field(default_factory=list)
    lanes: list[Tensor] = field(default_factory=list)
    placed: bool = True


@dataclass
class _Stage:
    """A chunk of the model on this rank: its place in the order of the forward pass, and the micro-batches it is at."""

    number: int
    first: bool
    last: bool
    forward: int = -1
    backward: int = -1


class ModuleHooks:
    """The hooks of a step, and what they have seen.

    once: of modules that run several times in a micro-batch, only the first time, which has a place of its own.
    digested: whether `seen` is asked; an audit wants the values alone.
    """

    once = digested = True

    def __init__(self, site: Site, step: int, dump: frozenset[str], dumps: DumpWriter | None) -> None:
        self.site, self.step = site, step
        self._dump, self._dumps = dump, dumps
        self._entries: dict[Key, _Entry] = {}
        self._handles: list[Any] = []

    def hook(self, model: Any) -> None:
        """Register hooks on a chunk and all modules in it."""
        pipeline = parallel_state.get_pipeline_model_parallel_world_size()
        number = (getattr(model, "vp_stage", None) or 0) * pipeline + parallel_state.get_pipeline_model_parallel_rank()
        stage = _Stage(number, first=model.pre_process, last=model.post_process)
        for name, module, row in _modules(model):
            if self.once and name.partition(".")[0] == EMBEDDING and not stage.first:
                continue  # MTP has a copy of it
            watched = _HookedModule(self, stage, name, row)
            self._handles.append(module.register_forward_pre_hook(watched.before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(watched.after))

    def unhook(self) -> None:
        """Leave the modules as they were."""
        for handle in self._handles:
            handle.remove()

    def record(self, key: Key, x: Tensor, module: Any, rule: PlacementRule | None, micro_batch: int) -> None:
        """Take the lanes of this rank's part of a tensor, and its values if they are to be dumped."""
        x = x.detach()
        entry = self._entries.setdefault(key, _Entry(str(x.dtype).removeprefix("torch.")))
        # A quantized tensor's bits are not its values.
        placed = rule(x, module, micro_batch, self.site) if rule is not None and type(x) is Tensor else None
        if placed is None or (entry.lanes and (str(x.dtype), placed.shape) != (f"torch.{entry.dtype}", entry.shape)):
            entry.placed = False
            return
        if not placed.parts:
            return
        entry.shape = placed.shape
        entry.places += placed.places
        entry.lanes.append(lanes(placed.parts).sum(0) if self.digested else _NO_LANES)
        name = f"{key.direction}/{key.module}/{key.tensor}"
        if self._dumps is not None and name in self._dump:
            for part in placed.parts:
                self._dumps.add(name, entry.dtype, placed.shape, part)

    def seen(self) -> list[Seen]:
        """All of it, in the order of execution of the first micro-batch."""
        return [
            Seen(key, e.dtype, e.shape, tuple(e.places), torch.stack(e.lanes).sum(0).tolist())
            if e.placed
            else Seen(key, e.dtype, (), None, [0] * LANES)
            for key, e in self._entries.items()
        ]


def tensor_names(model: Any) -> set[str]:
    """Return the names of the tensors of a chunk that may have a digest in a trace."""
    names = set()
    for name, _, row in _modules(model):
        for end, tensors in (("input", row.inputs), ("output", row.outputs)) if row else ():
            for tensor in (_numbered(end, n) for n in range(len(tensors))):
                names |= {f"{FORWARD}/{name}/{tensor}", f"{BACKWARD}/{name}/{_other_end(tensor)}"}
    return names


def named_modules(model: Any, *, every: bool = False) -> list[tuple[str, Any]]:
    """Return the modules that may be hooked, or every module, under their names in the whole model."""
    return [(name, module) for name, module, _ in _modules(model, every=every)]


def _modules(model: Any, *, every: bool = False) -> list[tuple[str, Any, ModuleRow | None]]:
    """Return the modules to hook, under their names in the whole model, each with its row."""
    hooked: list[tuple[str, Any, ModuleRow | None]] = []
    met = set()

    def visit(module: Any, path: tuple[str, ...], unplaced: bool) -> None:
        if id(module) in met or (class_names(module) & set(NOTHING) and not every):
            return
        met.add(id(module))
        name = ".".join(path) or ROOT
        row = None if unplaced else row_of(module, name)
        hooked.append((name, module, row))
        if row is not None and row.below == "skipped" and not every:
            return
        for child, inner in module.named_children():
            below = unplaced or (row is not None and row.below == "unplaced")
            visit(inner, (*path, _number(path, child, inner, module)), below)

    visit(model, (), False)
    return hooked


def _number(path: tuple[str, ...], child: str, module: Any, siblings: Any) -> str:
    """Return a child's name; of a layer or an expert, its number in the whole model."""
    if path[-1:] == ("layers",) and hasattr(module, "layer_number"):
        return str(module.layer_number - 1)
    if path[-1:] == ("local_experts",):
        return str(parallel_state.get_expert_model_parallel_rank() * len(siblings) + int(child))
    return child


class _Call(NamedTuple):
    """A module at work. since: autograd nodes of it have at least this number."""

    since: int
    micro_batch: int
    recompute: bool  # activation recomputation: recorded the first time
    inputs: list[tuple[str, Tensor, PlacementRule | None]]


class _HookedModule:
    def __init__(self, hooks: ModuleHooks, stage: _Stage, name: str, row: ModuleRow | None) -> None:
        self.hooks, self.stage, self.name, self.row = hooks, stage, name, row
        ends = row is None or not row.stages
        self.has_input, self.has_output = ends or stage.first, ends or stage.last
        self.calls: list[_Call | None] = []
        self.latest: int | None = None  # micro-batch of a forward pass

    def before(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Record the inputs."""
        recompute = torch._C._current_graph_task_id() != -1
        if self.name == ROOT and not recompute:
            self.stage.forward += 1
        micro_batch = self.stage.backward if recompute else self.stage.forward
        if self.hooks.once and not recompute and micro_batch == self.latest:  # of MTP
            self.calls.append(None)
            return
        self.latest = self.latest if recompute else micro_batch
        inputs = _inputs(self.row, args, kwargs) if self.has_input else []
        call = _Call(torch.autograd._get_sequence_nr(), micro_batch, recompute, inputs)
        self.calls.append(call)
        if not recompute:
            for tensor, x, rule in inputs:
                self._record(FORWARD, tensor, rule, module, micro_batch, x)

    def after(self, module: Any, args: tuple, output: Any) -> None:
        """Record the outputs, and hook the gradients."""
        call = self.calls.pop()
        if call is None:
            return
        outputs = _outputs(self.row, output) if self.has_output else []
        if not call.recompute:
            for tensor, x, rule in outputs:
                self._record(FORWARD, tensor, rule, module, call.micro_batch, x)
        if not torch.is_grad_enabled():
            return
        ends = [x for x in _tensors(output) if x.grad_fn is not None]
        if self.name == ROOT:
            for x in ends:
                x.register_hook(partial(self._backward_begins, call.micro_batch))
        for tensor, x, rule in outputs:
            if x.grad_fn is not None:
                record = partial(self._record, BACKWARD, _other_end(tensor), rule, module, call.micro_batch)
                x.register_hook(record)
        for tensor, x, rule in call.inputs:
            if x.requires_grad:
                record = partial(self._record, BACKWARD, _other_end(tensor), rule, module, call.micro_batch)
                _on_gradient(x, ends, call.since, record)

    def _backward_begins(self, micro_batch: int, gradient: Tensor) -> None:
        self.stage.backward = micro_batch

    def _record(
        self, direction: str, tensor: str, rule: PlacementRule | None, module: Any, micro_batch: int, x: Tensor
    ) -> None:
        self.hooks.record(Key(self.stage.number, direction, self.name, tensor), x, module, rule, micro_batch)


def _inputs(
    row: ModuleRow | None, args: tuple, kwargs: dict[str, Any]
) -> list[tuple[str, Tensor, PlacementRule | None]]:
    """Return the tensors that a module is given: those of its row, or without one all that hold floats."""
    if row is None:
        given = [x for x in _tensors((args, tuple(kwargs.values()))) if x.is_floating_point()]
        return [(_numbered("input", n), x, None) for n, x in enumerate(given)]
    tensors: list[tuple[str, Tensor, PlacementRule | None]] = []
    for n, (name, rule) in enumerate(row.inputs):
        x = args[n] if n < len(args) else kwargs.get(name)
        if torch.is_tensor(x):
            tensors.append((_numbered("input", n), x, rule))
    return tensors


def _outputs(row: ModuleRow | None, output: Any) -> list[tuple[str, Tensor, PlacementRule | None]]:
    """Return the tensors that a module returns: those of its row, or without one all that hold floats."""
    given = output if isinstance(output, tuple | list) else (output,)
    if row is None:
        return [(_numbered("output", n), x, None) for n, x in enumerate(_tensors(given)) if x.is_floating_point()]
    given = [x[0] if isinstance(x, tuple) and x else x for x in given]  # a norm's result, beside that of the layer
    pairs = enumerate(zip(given, row.outputs, strict=False))
    return [(_numbered("output", n), x, rule) for n, (x, rule) in pairs if torch.is_tensor(x)]


def _tensors(values: Any) -> list[Tensor]:
    if torch.is_tensor(values):
        return [values]
    return [x for value in values for x in _tensors(value)] if isinstance(values, tuple | list) else []


def _numbered(end: str, n: int) -> str:
    return f"{end}.{n}" if n else end


def _other_end(tensor: str) -> str:
    """Name the gradient of an output as the input of the backward pass, and the other way round."""
    end, dot, number = tensor.partition(".")
    return {"input": "output", "output": "input"}[end] + dot + number


def _on_gradient(x: Tensor, ends: Iterable[Tensor], since: int, record: Callable[[Tensor], None]) -> None:
    """Have the gradient recorded that a module sends to its input `x`.

    ends:  what the module returned.
    since: nodes of the module's own graph have at least this sequence number.
    """
    edge = torch.autograd.graph.get_gradient_edge(x)
    senders: list[tuple[Any, list[int]]] = []
    met, ahead = set(), [end.grad_fn for end in ends]
    while ahead:
        node = ahead.pop()
        if node is None or node in met or node._sequence_nr() < since:
            continue
        met.add(node)
        slots = [n for n, (to, slot) in enumerate(node.next_functions) if to is edge.node and slot == edge.output_nr]
        if slots:
            senders.append((node, slots))
        ahead += [to for to, _ in node.next_functions if to is not edge.node]
    leaving = _Leaving(len(senders), record)
    for node, slots in senders:
        node.register_hook(partial(leaving.sent, slots))


class _Leaving:
    """The gradient that a module sends to an input: the sum of what its nodes send, as autograd adds it up."""

    def __init__(self, senders: int, record: Callable[[Tensor], None]) -> None:
        self.remaining, self.record = senders, record
        self.total: Tensor | None = None

    def sent(self, slots: Sequence[int], gradients: Sequence[Tensor | None], _: Any) -> None:
        """Note that a node has run. gradients: what it sends along each of its edges."""
        for slot in slots:
            if (gradient := gradients[slot]) is not None:
                self.total = gradient if self.total is None else self.total + gradient
        self.remaining -= 1
        if self.remaining == 0 and self.total is not None:
            total, self.total = self.total, None
            self.record(total)
