"""Bridge's converter between Hugging Face checkpoints and Megatron models: the only place that takes it."""

import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from tp_invariant_recipes.reading import parse_object, read_limited
from tp_invariant_recipes.sources.hf_families import FAMILIES
from tp_invariant_recipes.sources.weights import CONFIG, LARGEST_CONFIG
from tp_invariant_recipes.start import lazy_imports

MODELS = "megatron.bridge.models"
# `model_type` in config.json -> Bridge's package that registers its conversion.
PACKAGES = {family.model_type: family.package for family in FAMILIES}


def run_no_model() -> None:
    """Import transformers for a process that runs none of its models: without torch's compiler, which takes three
    seconds, and which its masks ask for a context in which they are made. Another package may still import it.
    """
    name = "torch._dynamo._trace_wrapped_higher_order_op"
    if name in sys.modules:
        return

    def real(attribute: str) -> Any:
        if attribute.startswith("__"):  # the import system looks for some
            raise AttributeError(attribute)
        if sys.modules.get(name) is module:
            del sys.modules[name]
        return getattr(import_module(name), attribute)

    sys.modules[name] = module = ModuleType(name)
    vars(module).update(TransformGetItemToIndex=nullcontext, __getattr__=real)
    try:
        with lazy_imports.in_parts("megatron.bridge"):
            import_module("transformers.masking_utils")
    finally:
        if sys.modules.get(name) is module:
            del sys.modules[name]


def from_folder(folder: Path) -> Any:
    """Return the AutoBridge of a folder with a config.json; it reads weights when they are asked for.

    Only files of the folder are read, and none of its code is run.
    """
    return _class(folder).from_hf_pretrained(str(folder), local_files_only=True)


def from_config(folder: Path) -> Any:
    """Return the AutoBridge of a folder that has a config.json alone, for weights that are to be written."""
    bridge = _class(folder)
    from transformers import AutoConfig

    return bridge.from_hf_config(AutoConfig.from_pretrained(str(folder), local_files_only=True))


def unused(folder: Path) -> tuple[str, ...]:
    """Return beginnings of modules of Bridge that weights of a folder's model do not need: training, other families."""
    others = {*PACKAGES.values()} - {PACKAGES[_model_type(folder)]}
    return ("megatron.bridge.training.", *(f"{MODELS}.{package}." for package in sorted(others)))


def _model_type(folder: Path) -> str:
    return str(parse_object(read_limited(folder / CONFIG, LARGEST_CONFIG))["model_type"])


def _class(folder: Path) -> Any:
    """Bridge is loaded (start/bridge.py). Of its families, only the folder's is imported: all take ten seconds more."""
    with lazy_imports.in_parts("megatron.bridge"):
        import_module(f"{MODELS}.{PACKAGES[_model_type(folder)]}")
        from megatron.bridge.models.conversion.auto_bridge import AutoBridge
        from megatron.bridge.models.conversion.param_mapping import AutoMapping

    # A local layer of numerics/megatron/families/layers.py, whose name would pass for a norm's.
    AutoMapping.register_module_type("RowParallelLinearLayerNorm", "row")
    return AutoBridge
