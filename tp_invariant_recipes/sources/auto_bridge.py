"""Bridge's converter between Hugging Face checkpoints and Megatron models: the only place that takes it."""

from pathlib import Path
from typing import Any


def from_folder(folder: Path) -> Any:
    """Return the AutoBridge of a folder with a config.json; it reads weights when they are asked for.

    Only files of the folder are read, and none of its code is run.
    """
    return _class().from_hf_pretrained(str(folder), local_files_only=True)


def from_config(folder: Path) -> Any:
    """Return the AutoBridge of a folder that has a config.json alone, for weights that are to be written."""
    from transformers import AutoConfig

    return _class().from_hf_config(AutoConfig.from_pretrained(str(folder), local_files_only=True))


def _class() -> Any:
    """Bridge is loaded (start/bridge.py)."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    # A local layer of numerics/megatron/families/layers.py, whose name would pass for a norm's.
    AutoMapping.register_module_type("RowParallelLinearLayerNorm", "row")
    return AutoBridge
