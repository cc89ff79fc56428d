"""Bridge's converter between Hugging Face checkpoints and Megatron models: the only place that takes it."""

from pathlib import Path
from typing import Any


def of(folder: Path) -> Any:
    """The AutoBridge of a folder with a config.json; it reads weights when they are asked for.

    Bridge is loaded (host/bridge.py). Only files of the folder are read, and none of its code is run.
    """
    from megatron.bridge import AutoBridge

    return AutoBridge.from_hf_pretrained(str(folder), local_files_only=True)
