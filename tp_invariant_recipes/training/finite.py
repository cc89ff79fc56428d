"""The callback that ends a run whose gradients are no numbers, where Bridge's own checks are off.

A captured step cannot wait for them (conf/cuda_graph/full.yaml). The norm of all gradients, which every rank has after
the step, is not finite if a gradient or the loss is not.
"""

import math

from megatron.bridge.training.callbacks import Callback, CallbackContext

from tp_invariant_recipes.errors import RunError


class Finite(Callback):
    """After the recorder, so that the ledger has the step."""

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Raise RunError. A step that the optimizer has skipped changed nothing."""
        if context.grad_norm is None or context.skipped_iter or math.isfinite(norm := float(context.grad_norm)):
            return
        raise RunError(
            f"the gradient norm of step {context.state.train_state.step + 1} is {norm}; cuda_graph=off stops at the "
            "first gradient that is no number, and tpi bisect finds the operation"
        )
