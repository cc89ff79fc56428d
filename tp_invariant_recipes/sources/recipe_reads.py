"""What a process reads while it runs a recipe, and whether its answer follows from that alone.

An audit hook sees every file opened and every folder listed; `os.stat` and its kind are replaced meanwhile. The answer
may follow from something else after an event that SILENT does not name, after a file is written, and where one of the
recipe's own files uses a module that PLAIN does not name: a clock, random numbers, a network.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from tp_invariant_recipes.start.start_clock import process_start

# Events of Python's audit that say nothing of the world outside.
SILENT = {
    *("builtins.id", "code.__new__", "compile", "exec", "fcntl.flock", "function.__new__", "import", "marshal.load"),
    *("marshal.dumps", "marshal.loads", "object.__delattr__", "object.__getattr__", "object.__setattr__", "os.mkdir"),
    *("glob.glob", "glob.glob/2", "os.walk", "pathlib.Path.glob", "pathlib.Path.rglob"),  # what they list is heard
    *("os.putenv", "os.truncate", "os.unsetenv", "pickle.find_class", "sys._getframe", "sys._getframemodulename"),
}
# Modules that a recipe's own files may import, and what they may use of them; None: everything.
PLAIN: Mapping[str, set[str] | None] = {
    **dict.fromkeys(("__future__", "abc", "collections", "contextlib", "copy", "dataclasses", "enum", "functools")),
    **dict.fromkeys(("itertools", "json", "math", "megatron", "omegaconf", "operator", "pathlib", "re", "string")),
    **dict.fromkeys(("transformers", "types", "typing", "typing_extensions", "warnings", "yaml")),
    "os": {"environ", "fspath", "getcwd", "getenv", "listdir", "makedirs", "path", "sep"},
    "sys": {"path", "version_info"},
    "torch": {"bfloat16", "dtype", "float16", "float32", "float64", "nn"},
}
_EXCLUDED_BUILTINS = {
    *("__import__", "__builtins__", "breakpoint", "compile", "eval", "exec", "getattr", "globals", "hash", "id"),
    "input",
}
# Modules that must not be reached as an attribute of another one: pathlib.os.
_THROUGH = {
    *("builtins", "datetime", "importlib", "multiprocessing", "os", "platform", "posix", "random", "secrets", "socket"),
    *("subprocess", "sys", "threading", "time", "torch", "uuid"),
}
_LOOKS = ("stat", "lstat", "access", "readlink")  # of `os`; they raise no event
_LOCK = ".megatron_config_lock_"  # a file that Bridge writes before it reads a configuration
_SPECIAL = ("/proc/", "/sys/", "/dev/")


@dataclass
class Reads:
    """What was read.

    files:   path -> its stamp. folders: path -> the names in it, as a digest.
    refused: why the answer may follow from something else; None: nothing says so.
    """

    files: dict[str, str | None] = field(default_factory=dict)
    folders: dict[str, str | None] = field(default_factory=dict)
    refused: str | None = None


_STAT = os.stat
_recording: list[Reads] = []  # what is being recorded: one, or none
_hooked: set[int] = set()  # processes with the hook, which cannot be taken back


def unchanged(files: Mapping[str, str | None], folders: Mapping[str, str | None]) -> bool:
    """Whether all that was read is as it was."""
    same = all(_stamp(path) == stamp for path, stamp in files.items())
    return same and all(_listing(path) == names for path, names in folders.items())


@contextmanager
def recorded(own: Path | None) -> Iterator[Reads]:
    """Record what this process reads in the block. own: the folder of the recipe's own files; None: it is Bridge's."""
    if os.getpid() not in _hooked:
        _hooked.add(os.getpid())
        sys.addaudithook(_on_audit_event)
    reads = Reads()
    _recording.append(reads)
    originals = {name: getattr(os, name) for name in _LOOKS}
    for name, original in originals.items():
        setattr(os, name, _looking(original))
    try:
        yield reads
    finally:
        _recording.clear()
        for name, original in originals.items():
            setattr(os, name, original)
    _add_modules(reads)
    if own is not None:
        _judge(reads, own)


def _looking(original: Callable[..., Any]) -> Callable[..., Any]:
    def look(path: Any, *args: Any, **kwargs: Any) -> Any:
        for reads in _recording if not isinstance(path, int) else ():
            _read(reads, path)
            if kwargs.get("dir_fd") is not None:
                reads.refused = "a path of a descriptor"
        return original(path, *args, **kwargs)

    return look


def _on_audit_event(event: str, args: tuple[Any, ...]) -> None:
    if not _recording or event in SILENT:
        return
    reads = _recording.pop()  # so that what follows is not heard
    try:
        if event == "open":
            _opened(reads, *args)
        elif event in ("os.listdir", "os.scandir"):
            if sys._getframe(1).f_code.co_filename != "<frozen importlib._bootstrap_external>":
                path = os.path.abspath(os.fsdecode(args[0] or "."))
                reads.folders.setdefault(path, _listing(path))
        elif not (event == "os.rename" and "__pycache__" in str(args[0])):
            reads.refused = event
    except Exception as error:  # the recipe goes on
        reads.refused = f"{event}: {error!r}"
    finally:
        _recording.append(reads)


def _opened(reads: Reads, path: Any, mode: str | None, flags: int) -> None:
    if isinstance(path, int):
        return
    name = os.fsdecode(path)
    if os.path.basename(os.path.dirname(name)) == "__pycache__":
        with suppress(ValueError):  # the bytecode of something else, such as pytest's
            _read(reads, importlib.util.source_from_cache(name))
        return
    temporary = flags & os.O_TMPFILE == os.O_TMPFILE or name == tempfile.gettempdir()
    if flags & (os.O_WRONLY | os.O_RDWR) and not temporary and _LOCK not in name:
        reads.refused = f"it writes {name}"
    elif not temporary:
        _read(reads, name)


def _read(reads: Reads, path: Any) -> None:
    name = os.path.abspath(os.fsdecode(path))
    if name.startswith(_SPECIAL) and name != os.devnull:
        reads.refused = f"it reads {name}"
    if name not in reads.files and _LOCK not in name:
        reads.files[name] = _stamp(name)


def _stamp(path: str) -> str | None:
    """Size, times of change and number of a file; "folder"; None: there is none."""
    try:
        status = _STAT(path)
    except OSError:
        return None
    if status.st_mode & 0o170000 == 0o040000:
        return "folder"
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def _listing(folder: str) -> str | None:
    with suppress(OSError):
        names = sorted(name for name in os.listdir(folder) if name != "__pycache__")
        return hashlib.sha256("\0".join(names).encode(errors="surrogateescape")).hexdigest()
    return None


def modules_in(folder: str) -> str | None:
    """A digest of the names in a folder of Python's path that an import may find."""
    with suppress(OSError):
        modules = [n for n in os.listdir(folder or ".") if "." not in n or n.endswith((".py", ".so", ".pth", "-info"))]
        return hashlib.sha256("\0".join(sorted(modules)).encode(errors="surrogateescape")).hexdigest()
    return None


def _add_modules(reads: Reads) -> None:
    """Add the modules imported before. One whose file has changed since this process began may be of the old file."""
    for name, module in list(sys.modules.items()):  # of a program's own file nobody imports anything
        file = vars(module).get("__file__") if isinstance(module, ModuleType) and name != "__main__" else None
        if isinstance(file, str) and file not in reads.files:
            with suppress(OSError):
                if _STAT(file).st_ctime >= _BEGAN:
                    reads.refused = f"{file} has changed"
            reads.files[file] = _stamp(file)


def refuse(why: str) -> None:
    """Keep nothing of what is being recorded."""
    for reads in _recording:
        reads.refused = why


def _began() -> float:
    """A second before this process began, in seconds since 1970; 0: nobody knows."""
    with suppress(OSError, ValueError, IndexError):
        return process_start() - 1
    return 0


_BEGAN = _began()


def _judge(reads: Reads, folder: Path) -> None:
    """Refuse where one of the recipe's own files imports what PLAIN does not name."""
    own = [Path(name) for name in reads.files if name.endswith(".py") and Path(name).is_relative_to(folder)]
    names = {part for file in own for part in (file.stem, file.parent.name)} - {*sys.builtin_module_names}
    for file in own:
        with suppress(OSError):
            if why := not_plain(file.read_bytes(), names):
                reads.refused = f"{file}: {why}"


def not_plain(source: bytes, own: set[str]) -> str | None:
    """What a source uses that PLAIN does not name; None: nothing. own: modules of the recipe itself."""
    tree = ast.parse(source)
    bound: dict[str, str] = {}  # name -> the module of PLAIN that it stands for
    parts: list[tuple[str, str | None]] = []  # (module, what is used of it)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root, _, rest = alias.name.partition(".")
                parts.append((root, rest.partition(".")[0] or None))
                bound |= {alias.asname or root: root} if not (rest and alias.asname) else {}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            root, _, rest = str(node.module).partition(".")
            parts += [(root, rest.partition(".")[0] or alias.name) for alias in node.names]
            parts += [(f"{root}.{alias.name}", None) for alias in node.names if alias.name in _THROUGH - own]
    limited = {name: PLAIN[root] for name, root in bound.items() if PLAIN.get(root) is not None}
    seen = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in limited:
                seen.add(node.value)
                parts.append((bound[node.value.id], node.attr))
            elif node.attr in _THROUGH - own:
                return f"an attribute {node.attr}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and (node.id in _EXCLUDED_BUILTINS or (node.id in limited and node not in seen)):
            return node.id
    for root, part in parts:
        allowed = PLAIN.get(root, set())
        if root not in own and allowed is not None and part not in allowed and (part or root not in PLAIN):
            return f"{root}.{part}" if part else root
    return None
