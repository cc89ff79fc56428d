"""The callback that takes digests of all gradients, weights and moments, whatever the layout.

Once, before the first step, the ranks tell each other what they hold; parts with one place are replicas. Then a step
costs a kernel for each kind of tensor and one all-reduce of a few numbers for every tensor (parts.py).

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
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.training.callbacks import CallbackContext

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.kernels.digest import COPIED, WITH_MAGNITUDE
from tp_invariant_recipes.kernels.tensor_part import TensorPart
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


class Digests(AroundOptimizerStep):
    """Takes the digests of every `every`th step, and of the optimizer's state at every `state_every`th. For every rank.

    experts:    "each", "together" or "auto", as ledger.experts.
    awaited:    steps whose digests are reported before the next one begins, which may fail: `tpi bisect` trains such.
    parameters: what they are of, known once training has started.
    initial:    of the weights before the first step, parameter → digest; None: training begins at a later one.
    check:      called with the step and the digests of what a run goes on from (all weights, master weights, moments)
                before its first step; what it finds wrong ends the training on all ranks. None: nobody checks here.
    listener:   called with the digests of every step, once the GPU has them: after the next update, since waiting for
                them would cost more than taking them. The host has then waited for the gradient norm, which comes after
                them. No checkpoint counts, and no training ends, before that.
    """

    def __init__(self, every: int, state_every: int = 0, awaited: Collection[int] = (), experts: str = "auto") -> None:
        self.every, self.state_every, self.awaited, self._experts = every, state_every, awaited, experts
        self.parameters: tuple[Parameter, ...] = ()
        self.initial: Mapping[str, str] | None = None
        self.check: Callable[[int, Recorded], str | None] | None = None
        self.listener: Callable[[Recorded], None] | None = None
        self._running = 0  # the step
        self._ended: int | None = None  # the step of which the listener has not been told
        self._taken: list[StartedSums] = []  # gradients of the running step, then of the one that has ended
        self._unmerged: list[StartedSums] = []  # all of the step that has ended
        self._forward: Any = None  # the hook that waits for the next forward
        self._stream: Any = None  # of the training step
        self._merging: Merging | None = None
        self._merges: dict[tuple[str, ...], Merge] = {}

    def on_train_start(self, context: CallbackContext) -> None:
        """Learn who holds what. Raises RunError, on every rank alike: also if what is loaded is not what was saved."""
        self._model = context.model
        self._shards = _shards(context.model)
        self._optimizer = OptimizerState(context.optimizer)
        stored = self._shards.stored_gradients(context.optimizer)
        gradients = self._shards.held(stored)
        # With several optimizers each has a norm of its own, of which this would not be the largest.
        alone = len(getattr(context.optimizer, "chained_optimizers", [None])) == 1
        magnitude = alone and all(part.values.dtype in WITH_MAGNITUDE for part in gradients)
        masters, weights = self._optimizer.masters(), self._shards.weights()
        self._device = weights[0].values.device
        self._whole_steps = context.state.cfg.model.cuda_graph_impl == FULL
        every_weight = Sums("weights", weights, self._device)
        every_weight.stacked = stacked = self._stacked(every_weight.names)
        self._gradients = Sums("gradients", gradients, self._device, magnitude=magnitude, stacked=stacked)
        self._read = MovingSums(
            lambda: self._shards.held(self._optimizer.gradients(stored)),
            self._optimizer.addresses_of_gradients,
            lambda held: Sums("clipped", held, self._device, stacked=stacked),
        )
        self._moments = MovingSums(
            self._held_moments,
            self._optimizer.addresses_of_moments,
            lambda held: Sums("moments", held, self._device, stacked=stacked),
        )
        rounded = {owner: stored for owner, stored in masters.items() if (stored.values.dtype, owner.dtype) == COPIED}
        others = {owner: stored for owner, stored in masters.items() if owner not in rounded}
        held = [*self._shards.held(rounded, copies=True), *self._shards.held(others)]
        self._masters = Sums("masters", held, self._device, stacked=stacked)
        parameters = tuple(
            Parameter(
                name,
                every_weight.shapes[name],
                self._gradients.dtypes.get(name),
                every_weight.dtypes[name],
                self._masters.dtypes.get(name),
            )
            for name in every_weight.names
        )
        try:
            self.parameters = digests.stacked(parameters) if stacked else parameters
        except ValueError as error:
            raise RunError(str(error)) from error
        recorded = {parameter.name for parameter in parameters if not parameter.follows}
        compared = recorded.union(name for _, name in union(sorted(self._shards.partly(rounded)), self._device))
        held = [part for part in weights if part.name in compared]
        self._weights = Sums("weights", held, self._device, recorded=recorded, stacked=stacked)
        self._memory = self._addresses()
        if context.state.train_state.step == 0:
            self.initial = self._now([every_weight]).weights
        else:
            self._check_loaded(context.state.train_state.step, every_weight)

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Have the state as the last step left it taken once the batch is there."""
        step = self._ended
        if step is not None and not self._taken and not self._is_state_due(step):
            self._ended = None
            self._tell(Recorded())
        elif step in self.awaited:
            self._start()
            self._merge()
            self._report()
        elif step is not None and self._whole_steps:
            self._start()  # a graph of the step calls no hook, and updates experts' biases before the optimizer's step
        elif step is not None:
            if self._is_state_due(step) and not self._moments.known:
                self._moments_now()  # asks all ranks, which a forward pass must not
            self._stream = torch.cuda.current_stream()
            self._forward = context.model[0].register_forward_pre_hook(self._on_forward)
        self._running = context.state.train_state.step + 1

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Its state is taken once the next step has its batch, a checkpoint is saved, or training ends."""
        self._ended = self._running

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
        if self._ended is not None and [started.sums.kind for started in self._taken] == ["gradients"]:
            self._taken.append(self._read.sums().started())
        self._start(state=True)
        self._merge()
        self._report()

    def close(self) -> None:
        """After a failure report what there is, without waiting for ranks that may be gone: a step without digests."""
        if self._merging and self._merging.done.query():
            self._report(alone=True)
        if self._merging is None and (self._ended is not None or self._unmerged):
            self._tell(Recorded())

    @contextmanager
    def around_optimizer_step(self) -> Iterator[None]:
        """Take the gradients' digests; tell the exact norm the largest gradient, which their kernel has found."""
        due = self._running % self.every == 0
        if due and self._addresses() != self._memory:
            raise RunError("parameters or gradients have moved in memory since training began: ledger.digests=0")
        self._start()
        self._merge()
        if due:
            self._taken.append(self._gradients.started())
        known = due and self._gradients.lanes.magnitude
        with grad_norm.largest_known(self._gradients.lanes.largest) if known else nullcontext():
            yield
        if due and self._is_state_due(self._running):
            self._taken.append(self._read.sums().started())
        self._report()

    def _on_forward(self, *_: Any) -> None:
        capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if torch.cuda.current_stream() == self._stream and not capturing:
            self._start()

    def _stacked(self, names: Sequence[str]) -> bool:
        """Whether the experts of a layer have one digest a matrix. It follows from the model and ledger.experts."""
        experts = sum(digests.stacked_name(name) != name for name in names)
        return self._experts == "together" or (self._experts == "auto" and experts >= digests.MANY)

    def _is_state_due(self, step: int) -> bool:
        return bool(self.state_every and step % self.state_every == 0)

    def _addresses(self) -> tuple[int, ...]:
        return (*self._shards.memory(), *self._optimizer.memory())

    def _held_moments(self) -> list[TensorPart]:
        """Return the moments of this rank's part, and how often its parameters were updated."""
        held = [
            part._replace(name=f"{state}/{part.name}")
            for state, values in self._optimizer.moments().items()
            for part in self._shards.held(values)
        ]
        counts = self._shards.named(self._optimizer.counts())
        held += [TensorPart(count, 0, 0, name=f"{STEP}/{name}") for name, count in counts.items()]
        return held

    def _check_loaded(self, step: int, weights: Sums) -> None:
        loaded = self._now([self._masters, weights, self._moments_now()])
        problem = self.check(step, loaded) if self.check else None
        for _, text in union([problem] if problem else [], self._device):
            raise RunError(text)

    def _now(self, sums: Sequence[Sums]) -> Recorded:
        return read_digests(self._merged([kind_sums.started() for kind_sums in sums]), texts=self._told)

    def _moments_now(self) -> Sums:
        self._optimizer.count()
        return self._moments.sums()

    def _start(self, *, state: bool = False) -> None:
        """Start the kernels over the state that the last step has left, unless they have been started."""
        if self._forward is not None:
            self._forward.remove()
            self._forward = None
        step, self._ended = self._ended, None
        if step is None:
            return
        state = state or self._is_state_due(step)
        if state or self._taken:
            gather_weights(self._model)
            after = [*([self._moments_now()] if state else ()), self._masters, self._weights]
            self._unmerged, self._taken = [*self._taken, *(kind_sums.started() for kind_sums in after)], []

    def _merge(self) -> None:
        taken, self._unmerged = self._unmerged, []
        if taken:
            self._merging = self._merged(taken)

    def _merged(self, taken: Sequence[StartedSums]) -> Merging:
        sums = tuple(started.sums for started in taken)
        key = tuple(kind_sums.kind for kind_sums in sums)
        merge = self._merges.get(key)
        if merge is None or merge.sums != sums:
            merge = self._merges[key] = Merge(sums, self._device)
        unlike = torch.cat([started.unlike for started in taken])
        lanes = torch.cat([started.lanes for started in taken])
        return Merging(merge.sums, merge.tensor, lanes, unlike, *merge(lanes, unlike))

    @property
    def _told(self) -> bool:
        """Return whether somebody reads digests here: on the other ranks only replicas are compared."""
        return self.listener is not None or self.check is not None

    def _tell(self, recorded: Recorded) -> None:
        if self.listener is not None:
            self.listener(recorded)

    def _report(self, *, alone: bool = False) -> None:
        merging, self._merging = self._merging, None
        if merging is not None:
            self._tell(read_digests(merging, texts=self._told, alone=alone))


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
