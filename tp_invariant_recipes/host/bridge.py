"""The one place where Megatron-Bridge is imported first: quietly, and with or without Transformer Engine."""

from importlib import import_module

from tp_invariant_recipes.host import transformer_engine
from tp_invariant_recipes.host.quiet import quiet


def load() -> None:
    """Import Bridge, whose whole model zoo comes along: 10 to 20 s the first time, nothing afterwards."""
    with quiet():
        transformer_engine.prepare_import()
        import_module("megatron.bridge.training.pretrain")
        # Autograd imports this at the first backward; forked ranks would each do it again.
        import_module("torch.fx.experimental.symbolic_shapes")
