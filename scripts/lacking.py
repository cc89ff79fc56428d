# SPDX-License-Identifier: Apache-2.0
"""What this Python has and lacks.

lacking.py --modules NAME…    status 0 if all of these modules are there
lacking.py --site             a .pth file through which a venv sees the packages of this Python
lacking.py LOCK…              the entries of these locks that are not installed, as one lock

scripts/bootstrap runs it with the Python of a container, so only the standard library is at hand.
"""

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path


def has_module(name: str) -> bool:
    """True if `import name` would find something; imports no more than the packages above it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def has_package(name: str) -> bool:
    """True if it is installed, in whatever version: the versions of a container belong together."""
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def lacking(lock: str) -> str:
    """Keep the entries `name==version` of a lock, each with its hashes, whose package is not installed."""
    entries = re.split(r"^(?=[^\s#])", lock, flags=re.MULTILINE)[1:]
    return "".join(entry for entry in entries if not has_package(entry.split("==")[0]))


def site_lines() -> str:
    """One line for each package folder; `addsitedir`, so that editable installs inside it work too."""
    folders = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return "".join(f"import site; site.addsitedir({folder!r})\n" for folder in folders)


if __name__ == "__main__":
    if sys.argv[1] == "--modules":
        sys.exit(not all(has_module(name) for name in sys.argv[2:]))
    if sys.argv[1] == "--site":
        print(site_lines(), end="")
    else:
        print("".join(lacking(Path(lock).read_text()) for lock in sys.argv[1:]), end="")
