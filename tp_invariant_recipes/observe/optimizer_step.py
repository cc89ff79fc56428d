# SPDX-License-Identifier: Apache-2.0
"""The only place that wraps `optimizer.step`: what looks at gradients and weights around it subscribes here.

    before the step   gradients are reduced over all ranks, and neither clipped nor used up
    the step          Megatron's: the gradient norm, clipping, the update
    after the step    weights are updated

Before the step the subscribers come in the reverse order of the callbacks, after it in their order. So an
audit's tensors come first, then dumps, and digests come last, right before clipping: they show what the optimizer gets.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from megatron.bridge.training.callbacks import Callback, CallbackContext


class AroundOptimizerStep(Callback):
    """A callback that subscribes."""

    def around_optimizer_step(self) -> AbstractContextManager[None]:
        """Entered before every step of the optimizer, left after it."""
        raise NotImplementedError


class OptimizerStep(Callback):
    """Wraps the step once for all that subscribe. It comes after them: they are ready when training starts.

    result: what the last step returned: whether it updated, the gradient norm, the number of zeros.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._subscribers = [callback for callback in reversed(callbacks) if isinstance(callback, AroundOptimizerStep)]
        self._wrapped: Any = None  # the optimizer
        self.result: Any = None

    def on_train_start(self, context: CallbackContext) -> None:
        """Wrap it."""
        if not self._subscribers:
            return
        optimizer, step = context.optimizer, context.optimizer.step

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as around:
                for subscriber in self._subscribers:
                    around.enter_context(subscriber.around_optimizer_step())
                self.result = step(*args, **kwargs)
            return self.result

        optimizer.step = wrapped
        self._wrapped = optimizer

    def restore(self) -> None:
        """Give the optimizer its own step back, where training has started."""
        if self._wrapped is not None:
            del self._wrapped.step  # what we set hides the method
            self._wrapped = None
