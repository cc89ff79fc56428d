"""The user's folders."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`tpi` in the user's cache: what tpi can make again. It may not exist yet."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "tpi"


def state_dir() -> Path:
    """`tpi` in the user's state: what tpi cannot make again, such as its list of jobs. It may not exist yet."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "tpi"
