"""The user's folders: answers that take seconds to make, each with a stamp of its sources, and Python's bytecode; and
the clock of starts.
"""

import hashlib
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import Any

from tp_invariant_recipes import reading
from tp_invariant_recipes.files import write_atomically

IMPORTS, KERNELS = "imports", "kernels and trials"


def process_start() -> float:
    """When this process began, in seconds since 1970, to 0.01 s. Raises OSError, ValueError, IndexError."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def _process_start() -> float:
    try:
        return process_start()
    except (OSError, ValueError, IndexError):
        return time.time()


@dataclass
class StartClock:
    """began: the command, or the training before this one in the same process has ended; seconds since 1970.

    setting_up, stepping: when the rank set itself up, and its first step began; 0: not yet.
    before:  the seconds of KERNELS when the first step began.
    seconds: of IMPORTS and KERNELS so far.
    """

    began: float = field(default_factory=_process_start)
    setting_up: float = 0.0
    stepping: float = 0.0
    before: float = 0.0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    counting: bool = False

    @contextmanager
    def counted(self, what: str) -> Iterator[None]:
        """Count the seconds of the block, unless it lies in another one that is counted."""
        if self.counting:
            yield
            return
        self.counting, since = True, time.monotonic()
        try:
            yield
        finally:
            self.counting = False
            self.seconds[what] += time.monotonic() - since

    def restart(self) -> None:
        """Forget a training of this process, since another one may follow."""
        self.began, self.seconds = time.time(), defaultdict(float)

    def step_begins(self) -> None:
        """Note that the first step begins on this rank."""
        self.stepping, self.before = time.time(), self.seconds[KERNELS]

    def parts(self) -> dict[str, float]:
        """End the first step, and return what the seconds since the start went to, in order."""
        imports, kernels = self.seconds[IMPORTS], self.seconds[KERNELS]
        return {
            "composing": self.setting_up - self.began - imports,
            IMPORTS: imports,
            "model and data": self.stepping - self.setting_up - self.before,
            KERNELS: kernels,
            "step": time.time() - self.stepping - (kernels - self.before),
        }


CLOCK = StartClock()


def count_kernels() -> None:
    """Count the seconds in which Triton compiles kernels, those of trials included where the trials are counted."""

    def compiled(*, times: Any, **_: Any) -> None:
        if not CLOCK.counting:
            CLOCK.seconds[KERNELS] += times.total / 1e6  # of microseconds

    with suppress(ImportError, AttributeError):  # of another Triton: a breakdown stops no training
        from triton import knobs

        knobs.compilation.listener = knobs.compilation.listener or compiled


def text(parts: Mapping[str, float]) -> str:
    """Return the parts as a line; of a file from elsewhere, those that `StartClock.parts` knows."""
    parts = {name: parts[name] for name in CLOCK.parts() if name in parts}
    each = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds >= 0.05)
    return f"first step after {sum(parts.values()):.1f} s: {each}"


def cache_dir() -> Path:
    """`tpi` in the user's cache: what tpi can make again. It may not exist yet."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "tpi"


def state_dir() -> Path:
    """`tpi` in the user's state: what tpi cannot make again, such as its list of jobs. It may not exist yet."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "tpi"


LIMIT = 16 * reading.MIB


def find(name: str) -> Any:
    """Return what `keep` has kept under a name, or what another program put there. Raises OSError, ValueError."""
    return reading.parse_json(reading.read_limited(_file(name), LIMIT))


def keep(name: str, value: Any) -> None:
    """Keep a value of JSON. One that cannot be kept is not, which costs time only."""
    with suppress(OSError, ValueError, TypeError):
        _file(name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_file(name), json.dumps(value, allow_nan=False))


def prune(folder: str, most: int) -> None:
    """Leave the latest values of a folder of the cache, and remove the others."""
    with suppress(OSError):
        files = sorted((cache_dir() / folder).glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        for file in files[:-most]:
            file.unlink()


def _file(name: str) -> Path:
    return cache_dir() / f"{name}.json"


def stamp(sources: Iterable[Path]) -> str:
    """SHA-256 of the interpreter, and of every source's path, size and time of change in ns."""
    digest = hashlib.sha256(sys.version.encode())
    for path in sorted(sources):
        state = None
        with suppress(OSError):  # a link that leads nowhere
            state = path.stat()
        digest.update(f"\n{path} {state and (state.st_size, state.st_mtime_ns)}".encode(errors="surrogateescape"))
    return digest.hexdigest()


PACKAGES = ("tp_invariant_recipes", "torch", "megatron.core", "megatron.bridge", "transformer_engine")


def keep_bytecode() -> Path | None:
    """From now on have Python keep bytecode in `bytecode_folder`, if it would keep none of a package that lacks it.

    returns: the folder; None: Python keeps bytecode where it always does, the user has chosen a folder
    (PYTHONPYCACHEPREFIX), or ours cannot be written.
    """
    if sys.pycache_prefix is not None or not packages_without_bytecode() or not _writable(bytecode_folder()):
        return None
    sys.pycache_prefix, sys.dont_write_bytecode = str(bytecode_folder()), False
    return bytecode_folder()


def bytecode_folder() -> Path:
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
