# SPDX-License-Identifier: Apache-2.0
"""The fields of Bridge's classes of settings, kept in a file: a typo shows at once, not after an import of 3 to 60 s.

`bridge_fields.json` beside this module is the table of the Bridge in the locks. It counts for an installed Bridge whose
sources have the bytes that it was made from; for another one tpi asks Bridge itself. Where Bridge is not installed, the
table counts.
"""

import functools
import hashlib
import importlib.util
import json
import operator
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tp_invariant_recipes.start import needed

Fields = Mapping[str, Any]  # field -> type hint
Hints = Mapping[str, Fields]  # dotted path of a class -> its fields

PACKAGES = ("megatron.bridge", "megatron.core")
FIELDS = Path(__file__).with_name("bridge_fields.json")

# Types that the file names. Only Bridge can check a field of another type.
PLAIN = {"int": int, "float": float, "bool": bool, "str": str, "null": types.NoneType}
_NAMES = {type_: name for name, type_ in PLAIN.items()}
_TEXT = "="  # before each text that a Literal allows
_BASE = ""  # in place of a field: the class of the table that a class derives from, whose fields it has, too

type _Row = dict[str, list[str] | None]


def read() -> Hints:
    """Return the classes of the table. A field has None for a hint where only Bridge can check its value.

    Empty: the installed Bridge has other sources.
    """
    sources, classes = table()
    same = not all(map(needed.there, PACKAGES)) or all(_digest(source) == digest for source, digest in sources.items())
    return classes if same else {}


@functools.cache
def table() -> tuple[dict[str, str], Hints]:
    """Return the sources and the classes of the file, whatever Bridge is installed.

    sources: "package/file" -> SHA-256 of its bytes.
    classes: dotted path -> field -> the types it takes; None: only Bridge can check it.
    """
    table = json.loads(FIELDS.read_text(encoding="utf-8"))
    rows: dict[str, _Row] = table["classes"]
    for path, own in rows.items():
        (base,) = own.pop(_BASE, None) or [""]
        rows[path] = rows.get(base.removeprefix(_TEXT), {}) | own  # a base has none itself
    return table["sources"], {path: hints(fields) for path, fields in rows.items()}


def row(fields: Fields) -> _Row:
    """Return the fields of a class as a file has them."""
    return {name: _names(hint) for name, hint in fields.items()}


def hints(row: _Row) -> Fields:
    """Return the reverse of `row`. Raises KeyError: no such type."""
    return {name: names and _hint(names) for name, names in row.items()}


def write(file: Path, classes: Mapping[str, tuple[type, Fields]]) -> None:
    """Make the file. classes: dotted path -> the class and its fields. Raises OSError."""
    sources = {source for cls, _ in classes.values() for source in _sources(cls)}
    rows = {path: row(fields) for path, (_, fields) in classes.items()}
    for path, (cls, _) in classes.items():
        base = next((p for p, (parent, _) in classes.items() if parent in cls.__mro__[1:] and _BASE not in rows[p]), "")
        if base:
            own = {n: names for n, names in rows[path].items() if n not in rows[base] or names != rows[base][n]}
            rows[path] = {_BASE: [f"{_TEXT}{base}"], **own}
    file.write_text(json.dumps({"sources": {source: _digest(source) for source in sorted(sources)}, "classes": rows}))


def _folder(package: str) -> Path:
    """Where an installed package lies; it is not imported for that."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    return Path((spec.submodule_search_locations or [""])[0])


def _sources(cls: type) -> Iterator[str]:
    """Yield the files that define a class and what it inherits."""
    for base in cls.__mro__:
        package = next((name for name in PACKAGES if base.__module__.startswith(f"{name}.")), None)
        if package:
            file = Path(str(sys.modules[base.__module__].__file__))
            yield f"{package}/{file.relative_to(_folder(package))}"


@functools.cache
def _digest(source: str) -> str | None:
    """SHA-256 of a source's bytes; None: the file is not there."""
    package, _, name = source.partition("/")
    try:
        return hashlib.sha256((_folder(package) / name).read_bytes()).hexdigest()
    except OSError:
        return None


def _names(hint: Any) -> list[str] | None:
    """Return the types of a hint as the file has them; None: not all have a name."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return [f"{_TEXT}{text}" for text in args] if all(isinstance(text, str) for text in args) else None
    if origin in (typing.Union, types.UnionType):
        parts = [_names(argument) for argument in args]
        return None if None in parts else [name for part in parts for name in part or ()]
    return [_NAMES[hint]] if isinstance(hint, type) and hint in _NAMES else None


def _hint(names: list[str]) -> Any:
    """Return the reverse of `_names`. Raises KeyError: no such type."""
    texts = tuple(name.removeprefix(_TEXT) for name in names if name.startswith(_TEXT))
    plain = [PLAIN[name] for name in names if not name.startswith(_TEXT)]
    return functools.reduce(operator.or_, [*([Literal[texts]] if texts else []), *plain])


# The models of `conf/model/` with their sizes, from a file: composing them all takes 25 s.
FILE = Path(__file__).with_name("models.json")


def rows() -> list[dict[str, Any]]:
    """Return a row per model, as `config.describe.model` makes it, in the order of names."""
    table: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return table


@dataclass(frozen=True)
class Service:
    """A service, by fields of Bridge's section `logger`.

    module: what Bridge imports. extra: of this package, which brings it.
    project, run_name: fields for `logging.project` and the run's name.
    signs: fields that Bridge takes for a wish to log there, whatever `logging=` says.
    """

    module: str
    extra: str
    project: str
    run_name: str
    signs: tuple[str, ...]


SERVICES = {
    "wandb": Service("wandb", "wandb", "wandb_project", "wandb_exp_name", ("wandb_project",)),
    "mlflow": Service("mlflow", "mlflow", "mlflow_experiment", "mlflow_run_name",
                      ("mlflow_description", "mlflow_experiment", "mlflow_run_name", "mlflow_tags",
                       "mlflow_tracking_uri")),
    "comet": Service("comet_ml", "comet", "comet_project", "comet_experiment_name",
                     ("comet_experiment_name", "comet_project", "comet_tags", "comet_workspace")),
}  # fmt: skip
