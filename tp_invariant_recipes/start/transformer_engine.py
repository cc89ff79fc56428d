"""A placeholder for Transformer Engine on machines without it.

Bridge's `peft/lora_layers.py` imports Transformer Engine unconditionally, whereas Megatron-Core uses local layers when
the import fails. So this module imports Megatron-Core first, without the placeholder, and then installs it for Bridge.
"""

import importlib.util
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Every module of Megatron-Core that decides at import whether Transformer Engine is available.
DECIDERS = (
    "megatron.core",
    "megatron.core.transformer.transformer_block",
    "megatron.core.models.gpt",
    "megatron.core.models.hybrid.hybrid_model",
    "megatron.core.optimizer",
    "megatron.core.distributed",
)

PLACEHOLDER_VERSION = "0.0.0"

# Module -> the names that Bridge uses at import.
NAMES = {
    "transformer_engine.pytorch": (
        "Linear", "LayerNormLinear", "RMSNorm", "LayerNorm", "GroupedLinear", "DotProductAttention",
        "TransformerLayer",
    ),
    "transformer_engine.pytorch.ops": ("Sequential", "FusibleOperation", "BasicOperation"),
}  # fmt: skip


def prepare_import() -> None:
    """Make `import megatron.bridge` work here, whether Transformer Engine is installed or not. Idempotent."""
    if "transformer_engine" in sys.modules or importlib.util.find_spec("transformer_engine") is not None:
        return
    for name in DECIDERS:
        import_module(name)
    parent = _module("transformer_engine")
    parent.__dict__["__version__"] = PLACEHOLDER_VERSION
    for name, classes in NAMES.items():
        module = _module(name)
        for cls in classes:
            setattr(module, cls, _missing(cls))
        holder, _, leaf = name.rpartition(".")
        setattr(sys.modules[holder], leaf, module)


def _module(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []
    module.__spec__ = ModuleSpec(name, loader=None, is_package=True)
    sys.modules[name] = module
    return module


def _missing(name: str) -> type:
    import torch

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"transformer_engine.pytorch.{name}: Transformer Engine is not installed (tpi doctor)")

    return type(name, (torch.nn.Module,), {"__init__": refuse})
