# SPDX-License-Identifier: Apache-2.0
"""The callback that takes digests of all gradients, weights and moments, whatever the layout.

Once, before the first step, the ranks tell each other what they hold; parts with one place are replicas. Then a step
costs a kernel for each kind of tensor and one all-reduce of a few numbers for every tensor (merge.py).

    kind               digests at                                            its kernel starts
    gradients          every `every`th step                                  before clipping
    clipped            those of them that are `state_every`th steps too      after the update, before they are zeroed
    masters, weights   every `every`th and every `state_every`th step        as the next step's first forward begins
    moments            every `state_every`th step                            the same

Checkpoints and the last step count as `state_every`th steps. No forward follows them at once: all kernels start there.
So between steps, where the host waits for the GPU several times (Bridge's logging, the next batch), nothing of ours
runs; and in the forward pass the GPU catches up with a host that does not wait. The all-reduce is not in the forward
pass, which pipeline stages reach one after the other, but before the next update, which all ranks reach in one order.

Nothing changes these tensors in between: the optimizer does later, in the same stream as the kernels, and so do the
routers of experts, which update their biases when the backward pass ends. Where weights are still being gathered
(overlap_param_gather), `gather_weights` waits for them: a collective of data-parallel ranks, which reach their forward
passes in one order. One CUDA graph of the whole step replays the routers' update too, and calls no hook: there the
kernels start before the step. A forward in another stream, or one that a graph of a layer captures, starts nothing.
Evaluation is between steps, where no forward is waited for.

A weight in bf16 is its master weight rounded. The kernel of the master weights checks that, so that such weights need
no digest. Where a rank has only a range of a master weight, the ranks' copies of the whole weight are compared as well.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.training.callbacks import CallbackContext

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.kernels.digest import COPIED, WITH_MAGNITUDE
from tp_invariant_recipes.kernels.launch import TensorPart
from tp_invariant_recipes.ledger import digests
from tp_invariant_recipes.ledger.digests import Parameter
from tp_invariant_recipes.numerics.sums import grad_norm
from tp_invariant_recipes.observe.digests.merge import Merge, Merging, Recorded, read_digests
from tp_invariant_recipes.observe.digests.sums import MovingSums, StartedSums, Sums
from tp_invariant_recipes.observe.optimizer_state import STEP, OptimizerState
from tp_invariant_recipes.observe.optimizer_step import AroundOptimizerStep
from tp_invariant_recipes.observe.shards import Shards, gather_weights
from tp_invariant_recipes.observe.union import union
from tp_invariant_recipes.settings.cuda_graphs import FULL


@dataclass(frozen=True)
class DigestPlan:
    """What a rank digests. Made before the first step; invalid when `memory` moves.

    every:      all weights. gradients … weights: the kinds of the table above. stored: of this rank's gradients.
    parameters: what the digests are of, as the ledger's header has them.
    """

    model: Any
    shards: Shards
    optimizer: OptimizerState
    device: torch.device
    every: Sums
    gradients: Sums
    clipped: MovingSums
    moments: MovingSums
    masters: Sums
    weights: Sums
    parameters: tuple[Parameter, ...]
    memory: tuple[int, ...]

    @classmethod
    def of(cls, model: Any, optimizer: Any, experts: str) -> "DigestPlan":
        """Learn who holds what. A collective. Raises RunError, on every rank alike. experts: as ledger.experts."""
        shards, state = _shards(model), OptimizerState(optimizer)
        stored, held_weights = shards.stored_gradients(optimizer), shards.weights()
        held_gradients = shards.held(stored)
        device = held_weights[0].values.device
        # With several optimizers each has a norm of its own, of which this would not be the largest.
        alone = len(getattr(optimizer, "chained_optimizers", [None])) == 1
        magnitude = alone and all(part.values.dtype in WITH_MAGNITUDE for part in held_gradients)
        every = Sums("weights", held_weights, device)
        several = sum(digests.stacked_name(name) != name for name in every.names)
        every.stacked = stacked = experts == "together" or (experts == "auto" and several >= digests.MANY)
        gradients = Sums("gradients", held_gradients, device, magnitude=magnitude, stacked=stacked)
        owned = state.masters()
        rounded = {owner: kept for owner, kept in owned.items() if (kept.values.dtype, owner.dtype) == COPIED}
        others = {owner: kept for owner, kept in owned.items() if owner not in rounded}
        held_masters = [*shards.held(rounded, copies=True), *shards.held(others)]
        masters = Sums("masters", held_masters, device, stacked=stacked)
        parameters = tuple(
            Parameter(
                name, every.shapes[name], gradients.dtypes.get(name), every.dtypes[name], masters.dtypes.get(name)
            )
            for name in every.names
        )
        recorded = {parameter.name for parameter in parameters if not parameter.follows}
        compared = recorded.union(name for _, name in union(sorted(shards.partly(rounded)), device))
        held_weights = [part for part in held_weights if part.name in compared]
        try:
            listed = digests.stacked(parameters) if stacked else parameters
        except ValueError as error:
            raise RunError(str(error)) from error
        return cls(
            model,
            shards,
            state,
            device,
            every,
            gradients,
            clipped=MovingSums(
                lambda: shards.held(state.gradients(stored)),
                state.addresses_of_gradients,
                lambda held: Sums("clipped", held, device, stacked=stacked),
            ),
            moments=MovingSums(
                lambda: _held_moments(shards, state),
                state.addresses_of_moments,
                lambda held: Sums("moments", held, device, stacked=stacked),
            ),
            masters=masters,
            weights=Sums("weights", held_weights, device, recorded=recorded, stacked=stacked),
            parameters=listed,
            memory=(*shards.memory(), *state.memory()),
        )

    def check_memory(self) -> None:
        """Raise RunError where parameters or gradients have moved: the sums are of what was there."""
        if (*self.shards.memory(), *self.optimizer.memory()) != self.memory:
            raise RunError("parameters or gradients have moved in memory since training began: ledger.digests=0")

    def moments_now(self) -> Sums:
        """Return the digests of the moments, and of the number of updates that they have had."""
        self.optimizer.count()
        return self.moments.sums()

    def after(self, *, state: bool) -> list[Sums]:
        """Return the kinds that are digested after a step. state: whether the optimizer's are among them."""
        gather_weights(self.model)
        return [*([self.moments_now()] if state else ()), self.masters, self.weights]


class Queue:
    """Steps on their way to the ledger, one in each place at most: running → ended → started → merged → reported.

    running, ended, started, merged: the step in a place; None: no step is there.
    tell:  called with a step and its digests. texts: whether somebody reads them here; otherwise replicas are compared.
    """

    def __init__(self, device: torch.device, tell: Callable[[int, Recorded], None] | None, *, texts: bool) -> None:
        self._device, self._tell, self._texts = device, tell or (lambda step, recorded: None), texts
        self.running = 0
        self.ended: int | None = None
        self.started: int | None = None
        self.merged: int | None = None
        self.gradients: list[StartedSums] = []  # of the running step, then of the one that has ended
        self._sums: list[StartedSums] = []  # all of the started step
        self._merging: Merging | None = None
        self._merges: dict[tuple[str, ...], Merge] = {}

    def end(self) -> None:
        """Note that the running step has ended."""
        self.ended = self.running

    def start(self, after: Sequence[Sums]) -> None:
        """Start the kernels over the state that the step has left, beside its gradients'."""
        self._sums, self.gradients = [*self.gradients, *(kind_sums.started() for kind_sums in after)], []
        self.started, self.ended = self.ended, None

    def merge(self) -> None:
        """Begin to sum over all ranks, if a step has been started. A collective."""
        if self.started is not None:
            self._merging = self.merging(self._sums)
            self._sums, self.merged, self.started = [], self.started, None

    def report(self, *, alone: bool = False) -> None:
        """Tell of the merged step, once the GPU has its digests. alone: ask no other rank."""
        step, merging, self.merged, self._merging = self.merged, self._merging, None, None
        if step is not None and merging is not None:
            self._tell(step, read_digests(merging, texts=self._texts, alone=alone))

    def skip(self) -> None:
        """Tell of a step that has no digests."""
        step = self.started if self.ended is None else self.ended
        self.started = self.ended = None
        if step is not None:
            self._tell(step, Recorded())

    def close(self) -> None:
        """After a failure tell what there is, without waiting for ranks that may be gone."""
        if self._merging is None:
            self.skip()
        elif self._merging.done.query():
            self.report(alone=True)
            self.skip()

    def now(self, sums: Sequence[Sums]) -> Recorded:
        """Return the digests of what is in memory. A collective."""
        return read_digests(self.merging([kind_sums.started() for kind_sums in sums]), texts=self._texts)

    def merging(self, taken: Sequence[StartedSums]) -> Merging:
        """Begin to sum these over all ranks."""
        sums = tuple(started.sums for started in taken)
        key = tuple(kind_sums.kind for kind_sums in sums)
        merge = self._merges.get(key)
        if merge is None or merge.sums != sums:
            merge = self._merges[key] = Merge(sums, self._device)
        return merge(taken)


class Digests(AroundOptimizerStep):
    """Takes the digests of every `every`th step, and of the optimizer's state at every `state_every`th. For every rank.

    experts:    "each", "together" or "auto", as ledger.experts.
    awaited:    steps whose digests are reported before the next one begins, which may fail: `tpi bisect` trains such.
    plan:       what they are of, known once training has started.
    initial:    of the weights before the first step, parameter → digest; None: training begins at a later one.
    check:      called with the step and the digests of what a run goes on from (all weights, master weights, moments)
                before its first step; what it finds wrong ends the training on all ranks. None: nobody checks here.
    listener:   called with every step and its digests, once the GPU has them: after the next update, since waiting for
                them would cost more than taking them. The host has then waited for the gradient norm, which comes after
                them. No checkpoint counts, and no training ends, before that.
    """

    plan: DigestPlan
    queue: Queue

    def __init__(self, every: int, state_every: int = 0, awaited: Collection[int] = (), experts: str = "auto") -> None:
        self.every, self.state_every, self.awaited, self._experts = every, state_every, awaited, experts
        self.initial: Mapping[str, str] | None = None
        self.check: Callable[[int, Recorded], str | None] | None = None
        self.listener: Callable[[int, Recorded], None] | None = None
        self._forward: Any = None  # the hook that waits for the next forward
        self._stream: Any = None  # of the training step

    def on_train_start(self, context: CallbackContext) -> None:
        """Make the plan. Raises RunError, on every rank alike: also if what is loaded is not what was saved."""
        model = context.state.cfg.model
        self._whole_steps = model.cuda_graph_impl == FULL or model.overlap_moe_expert_parallel_comm
        plan = self.plan = DigestPlan.of(context.model, context.optimizer, self._experts)
        read = self.listener is not None or self.check is not None
        self.queue = Queue(plan.device, self.listener, texts=read)
        step = context.state.train_state.step
        if step == 0:
            self.initial = self.queue.now([plan.every]).weights
            return
        gather_weights(context.model, loaded=True)
        moments = [plan.moments_now()] if context.state.cfg.checkpoint.load_optim else []  # else there are none yet
        loaded = self.queue.now([plan.masters, plan.every, *moments])
        problem = self.check(step, loaded) if self.check else None
        for _, text in union([problem] if problem else [], plan.device):
            raise RunError(text)

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Have the state as the last step left it taken once the batch is there."""
        step = self.queue.ended
        if step is not None and not self.queue.gradients and not self._is_state_due(step):
            self.queue.skip()
        elif step in self.awaited:
            self._start()
            self.queue.merge()
            self.queue.report()
        elif step is not None and self._whole_steps:
            # A graph of the step and the combined schedule call no hook. They update experts' biases before the
            # optimizer's step.
            self._start()
        elif step is not None:
            if self._is_state_due(step) and not self.plan.moments.known:
                self.plan.moments_now()  # asks all ranks, which a forward pass must not
            self._stream = torch.cuda.current_stream()
            self._forward = context.model[0].register_forward_pre_hook(self._on_forward)
        self.queue.running = context.state.train_state.step + 1

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Its state is taken once the next step has its batch, a checkpoint is saved, or training ends."""
        self.queue.end()

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        """Bridge has written a checkpoint, and with `checkpoint.async_save` has trained more steps since."""
        if not context.state.cfg.checkpoint.async_save:
            self.on_checkpoint_scheduled()

    def on_checkpoint_scheduled(self) -> None:
        """Have the step in the ledger before the manifest is written, which makes the checkpoint count."""
        self.finish()
        dist.barrier()

    def on_train_end(self, context: CallbackContext) -> None:
        """Report the last step's."""
        self.finish()

    def finish(self) -> None:
        """Report the last step's, with the optimizer's state and with all other ranks."""
        queue = self.queue
        if queue.ended is not None and [started.sums.kind for started in queue.gradients] == ["gradients"]:
            queue.gradients.append(self.plan.clipped.sums().started())
        self._start(state=True)
        queue.merge()
        queue.report()

    def close(self) -> None:
        """After a failure report what there is, without waiting for ranks that may be gone: a step without digests."""
        if hasattr(self, "queue"):
            self.queue.close()

    @contextmanager
    def around_optimizer_step(self) -> Iterator[None]:
        """Take the gradients' digests; tell the exact norm the largest gradient, which their kernel has found."""
        plan, queue = self.plan, self.queue
        due = queue.running % self.every == 0
        if due:
            plan.check_memory()
        self._start()
        queue.merge()
        if due:
            queue.gradients.append(plan.gradients.started())
        known = due and plan.gradients.lanes.magnitude
        with grad_norm.largest_known(plan.gradients.lanes.largest) if known else nullcontext():
            yield
        if due and self._is_state_due(queue.running):
            queue.gradients.append(plan.clipped.sums().started())
        queue.report()

    def _on_forward(self, *_: Any) -> None:
        capturing = self.plan.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if torch.cuda.current_stream() == self._stream and not capturing:
            self._start()

    def _is_state_due(self, step: int) -> bool:
        return bool(self.state_every and step % self.state_every == 0)

    def _start(self, *, state: bool = False) -> None:
        """Start the kernels over the state that the last step has left, unless they have been started."""
        if self._forward is not None:
            self._forward.remove()
            self._forward = None
        if (step := self.queue.ended) is not None:
            self.queue.start(self.plan.after(state=state or self._is_state_due(step)))


def _held_moments(shards: Shards, optimizer: OptimizerState) -> list[TensorPart]:
    """Return the moments of this rank's part, and how often its parameters were updated."""
    held = [
        part._replace(name=f"{state}/{part.name}")
        for state, values in optimizer.moments().items()
        for part in shards.held(values)
    ]
    counts = shards.named(optimizer.counts())
    return [*held, *(TensorPart(count, 0, 0, name=f"{STEP}/{name}") for name, count in counts.items())]


def _shards(model: Sequence[Any]) -> Shards:
    """Raise RunError on every rank if any rank cannot place its tensors."""
    shards, problem = None, None
    try:
        shards = Shards(model)
    except RunError as error:
        problem = str(error)
    for _, text in union([problem] if problem else [], next(model[0].parameters()).device):
        raise RunError(text)
    assert shards is not None
    return shards
