"""Whether Python must compile the packages of a run again at every start, since their bytecode is nowhere.

Images often set PYTHONDONTWRITEBYTECODE, and leave packages without bytecode. Then the import of Megatron-Bridge, some
6,000 modules, took 12.4 s instead of 4.8 s on an H200 machine.
"""

import os
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path

PACKAGES = ("torch", "megatron.core", "megatron.bridge", "transformer_engine")


def packages_without_bytecode() -> list[str]:
    """Those of PACKAGES that are installed without bytecode, where Python will not write it. Imports none of them."""
    return [name for name in PACKAGES if (file := _bytecode(name)) and not (file.exists() or _will_be_written(file))]


def _bytecode(package: str) -> Path | None:
    """The file for the bytecode of a package's first module; None: the package is not installed, or has no source."""
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None or not spec.has_location or not spec.origin.endswith(".py"):
        return None
    return Path(cache_from_source(spec.origin))


def _will_be_written(file: Path) -> bool:
    folder = next(parent for parent in file.parents if parent.exists())
    return not sys.dont_write_bytecode and os.access(folder, os.W_OK)
