"""The one place where Megatron-Bridge is imported first: quietly, and with or without Transformer Engine."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from tp_invariant_recipes.host import transformer_engine
from tp_invariant_recipes.host.quiet import quiet

BRIDGE = "megatron.bridge.training.pretrain"


def load() -> None:
    """Import Bridge, whose whole model zoo comes along: 10 to 20 s the first time, nothing afterwards."""
    if BRIDGE in sys.modules:
        return
    with quiet(), _nothing_is_garbage():
        transformer_engine.prepare_import()
        import_module(BRIDGE)
        # Autograd imports this at the first backward; forked ranks would each do it again.
        import_module("torch.fx.experimental.symbolic_shapes")


@contextmanager
def _nothing_is_garbage() -> Iterator[None]:
    """Look for no garbage in the block, nor later in what it makes.

    Megatron collects garbage as a training starts. In forked ranks that would walk through all of Bridge, and copy it.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collected:
            gc.enable()
