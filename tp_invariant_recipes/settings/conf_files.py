# SPDX-License-Identifier: Apache-2.0
"""Where the Hydra trees lie: `conf/` (beside the package in a checkout, inside it in a wheel), and a user's own."""

import itertools
import os
import re
from pathlib import Path

from tp_invariant_recipes.settings.keys import nearest

_PACKAGE = Path(__file__).resolve().parents[1]


def conf_dir() -> Path:
    """Return the folder that holds `config.yaml` and the groups."""
    inside = _PACKAGE / "conf"
    return inside if inside.is_dir() else _PACKAGE.parent / "conf"


def user_dir() -> Path:
    """Return a user's own tree, laid out as `conf/`: `cluster/mysite.yaml` is `cluster=mysite`. It need not exist."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(home) / "tpi"


def sources() -> list[Path]:
    """Every file that decides what is composed without a recipe: of both trees, and of this package."""
    trees = ((conf_dir(), "*.yaml"), (user_dir(), "*.yaml"), (_PACKAGE, "*.py"))
    return [file for folder, pattern in trees for file in folder.rglob(pattern)]


def groups() -> dict[str, tuple[str, ...]]:
    """Every Hydra group and its options, e.g. {"numerics": ("stock",)}; names starting with _ are only bases."""
    return {group: options(group) for group in group_names()}


def options(group: str) -> tuple[str, ...]:
    """Return the options of a group."""
    return tuple(sorted((*_options(conf_dir(), group), *_options(user_dir(), group))))


def group_names() -> list[str]:
    """Every Hydra group, such as "numerics"."""
    with os.scandir(conf_dir()) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


def summary(group: str, option: str) -> str:
    """Return the first sentence of the comment that begins an option's file: what it is."""
    return re.split(r"(?<=\.)\s", description(group, option), maxsplit=1)[0]


def description(group: str, option: str) -> str:
    """Return the comment that begins an option's file, on one line."""
    shipped = conf_dir() / group / f"{option}.yaml"
    file = shipped if shipped.exists() else user_dir() / group / f"{option}.yaml"
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    lines = [line for line in lines if "@package" not in line and line.strip()]
    return " ".join(line[1:].strip() for line in itertools.takewhile(lambda line: line.startswith("#"), lines))


def users_file(group: str, option: str) -> Path | None:
    """Return the file of an option in the user's own tree; None where it is one of ours."""
    return user_dir() / group / f"{option}.yaml" if option in _options(user_dir(), group) else None


def problems() -> list[str]:
    """Everything in the user's own tree that would be passed over in silence: one line a file."""
    mine = user_dir()
    if not mine.is_dir():
        return []
    files = ((file, _passed_over(file.relative_to(mine))) for file in sorted(mine.glob("**/[!.]*.y*ml")))
    return [f"{file}: {why}" for file, why in files if why]


def _passed_over(file: Path) -> str | None:
    """Why a file of the user's tree would never be read. file: relative to the tree."""
    group = file.parts[0]
    if len(file.parts) != 2:
        return "not in the folder of a group, such as cluster/mysite.yaml"
    if group not in group_names():
        return f"'{group}' is no group{nearest(group, group_names())}"
    if file.suffix != ".yaml":
        return "the name must end in .yaml"
    if (conf_dir() / file).exists():
        return f"{group}={file.stem} is one of tpi's own; give the file another name"
    return None


def _options(tree: Path, group: str) -> list[str]:
    """Return the options that can be chosen."""
    try:
        names = os.listdir(tree / group)  # Path.glob takes ten times as long, and each composition reads all groups
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    return [name.removesuffix(".yaml") for name in names if name.endswith(".yaml") and name[0] not in "_."]
