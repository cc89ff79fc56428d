"""The folder of what tpi can make again."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`tpi` in the user's cache. It may not exist yet."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "tpi"
