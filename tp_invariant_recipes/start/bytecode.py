"""Bytecode of a run's packages, which Python otherwise compiles again at every start.

Images often set PYTHONDONTWRITEBYTECODE, and leave packages without bytecode. Then the import of Megatron-Bridge, some
6,000 modules, took 12.4 s instead of 4.8 s on an H200 machine. tpi keeps it in a folder of its own there.
"""

import os
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from tp_invariant_recipes.start.cache import cache_dir

PACKAGES = ("tp_invariant_recipes", "torch", "megatron.core", "megatron.bridge", "transformer_engine")


def keep() -> Path | None:
    """From now on have Python keep bytecode in `folder`, if it would keep none of a package that lacks it.

    returns: the folder; None: Python keeps bytecode where it always does, the user has chosen a folder
    (PYTHONPYCACHEPREFIX), or ours cannot be written.
    """
    if sys.pycache_prefix is not None or not packages_without_bytecode() or not _writable(folder()):
        return None
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder()), False
    return folder()


def folder() -> Path:
    """In tpi's cache. Python checks the time of each source."""
    return cache_dir() / "bytecode"


def packages_without_bytecode() -> list[str]:
    """Those of PACKAGES that are installed without bytecode, where Python will not write it. Imports none of them."""
    files = {name: file for name in PACKAGES if (file := _bytecode(name))}
    writes = not sys.dont_write_bytecode
    return [name for name, file in files.items() if not (file.exists() or (writes and _writable(file)))]


def _bytecode(package: str) -> Path | None:
    """Return the file for the bytecode of a package's first module; None: the package is not installed, or has no
    source.
    """
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None or not spec.has_location or not spec.origin.endswith(".py"):
        return None
    return Path(cache_from_source(spec.origin))


def _writable(path: Path) -> bool:
    return os.access(next(parent for parent in path.parents if parent.exists()), os.W_OK)
