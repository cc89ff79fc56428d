"""A seal on what tpi writes: it shows later that this user's own tpi wrote it, and that nobody has changed it since.

The seal is an HMAC with a key in the user's state folder. A folder from elsewhere has none, or one of another key.
"""

import hmac
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from tp_invariant_recipes.start.cache import state_dir

_BYTES = 32  # of a key


def seal(content: Any) -> str:
    """Return the seal of a value of JSON; empty: this user has no key, and none can be written."""
    key = _key() or _new_key()
    return hmac.digest(key, json.dumps(content, sort_keys=True).encode(), "sha256").hex() if key else ""


def is_own(content: Any, seal_: str) -> bool:
    """Whether this user's tpi sealed the value."""
    return bool(seal_) and _key() is not None and hmac.compare_digest(seal(content).encode(), seal_.encode())


def others_can_change(file: Path) -> str | None:
    """Why the contents of a file are not the user's alone; None: they are.

    A folder that others can write lets them put there what the file imports. What belongs to root is trusted.
    """
    for path in (file.resolve(), file.resolve().parent):
        try:
            status = path.stat()
        except OSError as error:
            return f"{path}: {error.strerror}"
        if status.st_uid not in (os.geteuid(), 0):
            return f"{path} belongs to another user"
        if status.st_mode & 0o022:
            return f"others can write {path} (chmod go-w)"
    return None


def _file() -> Path:
    return state_dir() / "seal.key"


def _key() -> bytes | None:
    """Return the user's key; None: there is none that only this user can read and write."""
    try:
        status, key = _file().stat(), _file().read_bytes()
    except OSError:
        return None
    return key if len(key) == _BYTES and status.st_uid == os.geteuid() and not status.st_mode & 0o077 else None


def _new_key() -> bytes | None:
    """Write a key where there is none: a file that another process writes now is whole soon."""
    with suppress(OSError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(_file(), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(os.urandom(_BYTES))
    return _key()
