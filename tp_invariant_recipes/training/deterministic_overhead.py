"""The callback that removes two costs of torch's deterministic mode, once Bridge has set the process up."""

from megatron.bridge.training.callbacks import Callback, CallbackContext

from tp_invariant_recipes.start.deterministic_overhead import deterministic_mode_without_its_extras


class DeterministicOverhead(Callback):
    """Takes the two costs away (start/deterministic_overhead.py). Last of the callbacks: it changes the environment,
    which the recorder reads first."""

    def on_train_start(self, context: CallbackContext) -> None:
        """Before the first step."""
        deterministic_mode_without_its_extras()
