"""What every launcher and rank does anew as it starts, done once in the worker that they are forked from.

A tenth of what a short run computes.
"""

import logging


def _enabled_for(self: logging.Logger, level: int) -> bool:
    """Without a cache, which every new level of each of Megatron-Bridge's loggers empties in all loggers."""
    return not self.disabled and self.manager.disable < level >= self.getEffectiveLevel()


def warm() -> None:
    """After Bridge's import."""
    from tp_invariant_recipes.ledger.run_files import Attempted, RunFile
    from tp_invariant_recipes.numerics.megatron import init
    from tp_invariant_recipes.reading import _adapter
    from tp_invariant_recipes.runs.index_cache import IndexManifest
    from tp_invariant_recipes.runs.lock import Holder

    init.rule_of("")  # compiles the patterns of all rules
    for kind in (Attempted, Holder, IndexManifest, RunFile):
        _adapter(kind)
    logging.Logger.isEnabledFor = _enabled_for
    logging.Manager._clear_cache = lambda self: None
