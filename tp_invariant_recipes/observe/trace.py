# SPDX-License-Identifier: Apache-2.0
"""The callback that takes digests of what goes in and out of every module, forward and backward, at chosen steps, and
writes out values.

All micro-batches and data-parallel ranks are one tensor (placement.py). Lanes of its parts add up, so what a rank keeps
of a tensor is two numbers a part (module_hooks.py). The ranks put theirs together when the step ends.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from megatron.bridge.training.callbacks import CallbackContext
from megatron.core import parallel_state

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.kernels.launch import TablePlace
from tp_invariant_recipes.ledger.digests import Traced, tensor_digest
from tp_invariant_recipes.numerics.sums.expert_groups import visits_of
from tp_invariant_recipes.observe.digests.sums import covers, dtype_name
from tp_invariant_recipes.observe.dump_writer import DumpWriter
from tp_invariant_recipes.observe.module_hooks import FORWARD, ModuleHooks, Seen, tensor_names
from tp_invariant_recipes.observe.optimizer_state import OptimizerState
from tp_invariant_recipes.observe.optimizer_step import AroundOptimizerStep
from tp_invariant_recipes.observe.placement import CONSECUTIVE, Site
from tp_invariant_recipes.observe.shards import Shards, gather_weights, unwrapped
from tp_invariant_recipes.observe.union import Diverged, by_value, gathered, union
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings.keys import nearest


class Tracing(AroundOptimizerStep):
    """Traces some steps, counted from 1. For every rank, after Digests and before Recorder.

    patterns: of the names of tensors whose values are written out at these steps: those of the trace, gradients before
              clipping, weights and master weights after the step.
    latest:   the trace of the step that has just ended; None: not a traced step.
    diverged: replicas that disagree in it, as StepRecord has them.
    """

    def __init__(self, steps: range, patterns: Sequence[str], run_dir: RunDir) -> None:
        self.steps, self.patterns, self._run_dir = steps, tuple(patterns), run_dir
        self.latest: tuple[Traced, ...] | None = None
        self.diverged: Diverged = ()
        self._hooks: ModuleHooks | None = None  # of a traced step
        self._dumps: DumpWriter | None = None  # where dumps go, from the start of training on
        self._dump: frozenset[str] = frozenset()  # the names that match, of tensors of this rank
        self._awaited: tuple[str, ...] = ()  # the patterns that no parameter matches, so that the trace must

    def on_train_start(self, context: CallbackContext) -> None:
        """Learn which parts this rank holds, and what to dump. RunError, on all ranks: a pattern matches nothing."""
        if not self.patterns:
            return
        self._dumps = DumpWriter(self._run_dir.path, dist.get_rank(), dist.get_world_size())
        shards = Shards(context.model)
        masters = shards.held(OptimizerState(context.optimizer).masters())
        self._held = {"gradients": shards.gradients(context.optimizer), "masters": masters, "weights": shards.weights()}
        here = {f"{kind}/{part.name}" for kind, held in self._held.items() for part in held}
        modules: set[str] = set().union(*(tensor_names(unwrapped(chunk)) for chunk in context.model))
        device = next(context.model[0].parameters()).device
        parameters, traced = ({name for _, name in union(sorted(names), device)} for names in (here, modules))
        if missing := unmatched(self.patterns, parameters | traced):
            raise RunError(f"ledger.dump: the model has no such tensor:{missing}")
        self._dump = frozenset(name for name in here | modules if any(fnmatchcase(name, p) for p in self.patterns))
        self._awaited = tuple(p for p in self.patterns if not any(fnmatchcase(name, p) for name in parameters))

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Register hooks on every module, if the step is to be traced."""
        self.latest, self.diverged = None, ()
        step = context.state.train_state.step + 1
        if step in self.steps:
            self._hooks = ModuleHooks(site_of(context), step, self._dump, self._dumps)
            for chunk in context.model:
                self._hooks.hook(unwrapped(chunk))

    @contextmanager
    def around_optimizer_step(self) -> Iterator[None]:
        """Dump the gradients."""
        self._add("gradients")
        yield

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Take the hooks off, and put together what all ranks saw. RunError, on all: what to dump has no place."""
        if self._hooks is None:
            return
        if self._dumps is not None:
            gather_weights(context.model)
        self._add("masters")
        self._add("weights")
        hooks, self._hooks = self._hooks, None
        hooks.unhook()
        self.latest, self.diverged = merged(gathered(hooks.seen()))
        if missing := unmatched(self._awaited, [tensor.name for tensor in self.latest if tensor.digest is not None]):
            raise RunError(f"ledger.dump: not in the trace, or without a position in the whole model:{missing}")
        if self._dumps is not None:
            self._dumps.close_step(hooks.step)

    def _add(self, kind: str) -> None:
        if self._hooks is None or self._dumps is None:
            return
        for part in self._held[kind]:
            if (name := f"{kind}/{part.name}") in self._dump:
                self._dumps.add(name, dtype_name(part.values), part.shape, part)


def unmatched(patterns: Iterable[str], names: Collection[str]) -> str:
    """Return a line for each pattern that no name matches, with the nearest name."""
    missing = [pattern for pattern in sorted(patterns) if not any(fnmatchcase(name, pattern) for name in names)]
    return "".join(f"\n  {pattern}{nearest(pattern, names)}" for pattern in missing)


def site_of(context: CallbackContext) -> Site:
    """Where this rank stands in the step that begins."""
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size, get_micro_batch_size

    config = context.state.cfg
    return site_here(
        unwrapped(context.model[0]).config,
        sequence=config.model.seq_length,
        batch=get_current_global_batch_size(),
        samples=get_micro_batch_size(),
        sampler=CONSECUTIVE if hasattr(config.model, "invariant_mode") else config.dataset.dataloader_type,
        context_shards=getattr(config.model, "context_shards", 1),
        visits=visits_of(unwrapped(context.model[0]).config),
    )


def site_here(config: Any, **of_step: Any) -> Site:
    """Where this rank stands. config: the model's. of_step: the fields of `Site` that a step decides."""
    return Site(
        config=config,
        sequence_parallel=config.sequence_parallel,
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        cp=parallel_state.get_context_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        dp=parallel_state.get_data_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        **of_step,
    )


# --- All ranks together ---

Name = tuple[str, str, str]  # direction, module, tensor


def merged(everyone: Sequence[Sequence[Seen]]) -> tuple[tuple[Traced, ...], Diverged]:
    """One trace of what the ranks saw, in the order of execution, and the replicas that disagree.

    Parts with the same places are replicas; of those that disagree the lowest rank's counts. No digest has a tensor of
    which a part has no place, or whose parts are not the whole of it.
    """
    parts: dict[Name, list[tuple[int, Seen]]] = {}
    for rank, saw in enumerate(everyone):
        for seen in saw:
            parts.setdefault(seen.key[1:], []).append((rank, seen))
    whole = lru_cache(maxsize=None)(covers)  # most tensors are cut alike
    trace, diverged = [], []
    for name in _order(everyone):
        direction, module, tensor = name
        dtype, shape = parts[name][0][1].dtype, parts[name][0][1].shape
        held: dict[tuple[TablePlace, ...], dict[int, list[int]]] = {}
        placed = True
        for rank, seen in parts[name]:
            placed &= seen.places is not None and (seen.dtype, seen.shape) == (dtype, shape)
            held.setdefault(seen.places or (), {})[rank] = seen.lanes
        groups = [by_value(replicas) for replicas in held.values()]
        diverged += [(direction, f"{module}/{tensor}", ranks) for ranks in groups if len(ranks) > 1]
        digest = None
        if placed and whole(tuple(place for places in held for place in places), shape):
            digest = _digest([next(iter(replicas.values())) for replicas in held.values()], dtype, shape)
        trace.append(Traced(direction, module, tensor, dtype, shape if digest else (), digest))
    return tuple(trace), tuple(diverged)


def _digest(lanes: list[list[int]], dtype: str, shape: tuple[int, ...]) -> str:
    return tensor_digest([sum(lane) for lane in zip(*lanes, strict=True)], dtype, shape)


def _order(everyone: Sequence[Sequence[Seen]]) -> list[Name]:
    """Direction, module and tensor of all that was seen: forward by stage, then backward by stage from the last."""
    stages: dict[tuple[bool, int], list[Name]] = {}
    for saw in everyone:
        own: dict[tuple[bool, int], list[Name]] = {}
        for stage, direction, module, tensor in (seen.key for seen in saw):
            place = (False, stage) if direction == FORWARD else (True, -stage)
            own.setdefault(place, []).append((direction, module, tensor))
        for place, names in own.items():
            before = stages.get(place, [])
            # A later rank's experts have higher numbers: they come last in the forward pass, first in the backward one.
            stages[place] = _interleave(before, names) if place[0] else _interleave(before[::-1], names[::-1])[::-1]
    return list(dict.fromkeys(name for place in sorted(stages) for name in stages[place]))


def _interleave(names: list[Name], others: list[Name]) -> list[Name]:
    """Both lists in one; what only the second has comes right after what precedes it there."""
    known = set(names)
    after: dict[Name | None, list[Name]] = {}
    last: Name | None = None
    for name in others:
        if name in known:
            last = name
        else:
            after.setdefault(last, []).append(name)
    return [*after.get(None, []), *(new for name in names for new in (name, *after.get(name, [])))]
