"""The first import of Megatron-Bridge happens only here: quietly, and with or without Transformer Engine."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from tp_invariant_recipes.host import transformer_engine
from tp_invariant_recipes.host.quiet import quiet

BRIDGE = "megatron.bridge.training.pretrain"


def load() -> None:
    """Import Bridge with its whole model zoo. The first call takes 10 to 20 s, later ones no time."""
    if BRIDGE in sys.modules:
        return
    with quiet(), _nothing_is_garbage():
        transformer_engine.prepare_import()
        import_module(BRIDGE)
        # Autograd imports this at the first backward pass; otherwise each forked rank would import it again.
        import_module("torch.fx.experimental.symbolic_shapes")


@contextmanager
def _nothing_is_garbage() -> Iterator[None]:
    """Disable garbage collection in the block, and exclude the block's objects from later collections.

    Megatron collects garbage when training starts. In a forked rank that would visit all of Bridge's objects and so
    copy their memory.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collected:
            gc.enable()
