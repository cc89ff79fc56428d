"""The callback that takes two costs of torch's deterministic mode away, once Bridge has set the process up."""

from megatron.bridge.training.callbacks import Callback, CallbackContext

from tp_invariant_recipes.host.deterministic_overhead import deterministic_mode_without_its_extras


class Lean(Callback):
    """Last of the callbacks: what is recorded of the environment is read before."""

    def on_train_start(self, context: CallbackContext) -> None:
        """Before the first step."""
        deterministic_mode_without_its_extras()
