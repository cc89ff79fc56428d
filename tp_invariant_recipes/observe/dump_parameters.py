# SPDX-License-Identifier: Apache-2.0
"""The callback that dumps gradients and weights at traced steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase

from megatron.bridge.training.callbacks import CallbackContext

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.observe.digests.sums import dtype_name
from tp_invariant_recipes.observe.module_hooks import tensor_names
from tp_invariant_recipes.observe.optimizer_state import OptimizerState
from tp_invariant_recipes.observe.optimizer_step import AroundOptimizerStep
from tp_invariant_recipes.observe.shards import Shards, gather_weights, unwrapped
from tp_invariant_recipes.observe.trace import Tracing, unmatched
from tp_invariant_recipes.observe.union import union


class DumpParameters(AroundOptimizerStep):
    """Adds this rank's pieces to the step's dump: gradients before clipping, weights and master weights after the step.

    For every rank, before `tracing`, which has the patterns, learns which names match, and writes the dump.
    """

    def __init__(self, tracing: Tracing) -> None:
        self.tracing = tracing
        self._running = 0

    def on_train_start(self, context: CallbackContext) -> None:
        """Learn which parts this rank holds, and what to dump. RunError, on all ranks: a pattern matches nothing."""
        self._model = context.model
        shards = Shards(context.model)
        masters = shards.held(OptimizerState(context.optimizer).masters())
        self._held = {"gradients": shards.gradients(context.optimizer), "masters": masters, "weights": shards.weights()}
        here = {f"{kind}/{part.name}" for kind, held in self._held.items() for part in held}
        modules: set[str] = set().union(*(tensor_names(unwrapped(chunk)) for chunk in context.model))
        device = next(context.model[0].parameters()).device
        parameters, traced = ({name for _, name in union(sorted(names), device)} for names in (here, modules))
        patterns = self.tracing.patterns
        if missing := unmatched(patterns, parameters | traced):
            raise RunError(f"ledger.dump: the model has no such tensor:{missing}")
        self.tracing.dump = frozenset(n for n in here | modules if any(fnmatchcase(n, pattern) for pattern in patterns))
        self.tracing.awaited = tuple(
            pattern for pattern in patterns if not any(fnmatchcase(n, pattern) for n in parameters)
        )

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Note the number of the step."""
        self._running = context.state.train_state.step + 1

    @contextmanager
    def around_optimizer_step(self) -> Iterator[None]:
        """Add the gradients."""
        self._add("gradients")
        yield

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Add the weights and master weights."""
        if self.tracing.dumps is not None and self._running in self.tracing.steps:
            gather_weights(self._model)
        self._add("masters")
        self._add("weights")

    def _add(self, kind: str) -> None:
        writer = self.tracing.dumps
        if writer is None or self._running not in self.tracing.steps:
            return
        for part in self._held[kind]:
            name = f"{kind}/{part.name}"
            if name in self.tracing.dump:
                writer.add(name, dtype_name(part.values), part.shape, part)
