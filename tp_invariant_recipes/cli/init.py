"""`tpi init`."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.host import terminal
from tp_invariant_recipes.settings.nearest import nearest

TEMPLATES = Path(__file__).with_name("templates")  # each file with .txt after its name: no linter takes it for ours


@dataclass(frozen=True)
class Kind:
    """What `tpi init` writes.

    path:     where by default; a folder where the kind has several files.
    commands: printed. The first writes nothing. {0}: where the file, or the folder's recipe, is.
    examples: whether examples and a tokenizer belong beside it.
    """

    path: str
    commands: tuple[str, ...]
    examples: bool = False


KINDS = {
    "recipe": Kind(
        "my_recipes.py", ("tpi train recipe={0}:small tp=2 --dry-run", "tpi verify recipe={0}:small tp=1,2")
    ),
    "sft": Kind(
        "my_sft",
        ("tpi train recipe={0}/recipe.py:tuned tp=2 --dry-run", "tpi verify recipe={0}/recipe.py:tuned tp=1,2"),
        examples=True,
    ),
    "lora": Kind(
        "my_lora",
        (
            "tpi train recipe={0}/recipe.py:base tp=2 --dry-run",
            "tpi train recipe={0}/recipe.py:base tp=2 save=10 run.dir={0}/base",
            "tpi verify recipe={0}/recipe.py:adapted tp=1,2",
        ),
        examples=True,
    ),
    "cluster": Kind("my_cluster.yaml", ("tpi submit qwen3_8b tp=8 save=500 --cluster-file {0} --dry-run",)),
}


def init(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="recipe, sft, lora or cluster.", show_default=False)],
    path: Annotated[
        Path | None,
        typer.Argument(help="Where: a file, or for sft and lora a folder. Default: my_recipes.py, my_sft …"),
    ] = None,
) -> None:
    """Write a commented recipe or cluster file to begin with.

    recipe: a small model as a recipe of Megatron-Bridge. sft, lora: a folder with a recipe that fine-tunes, examples
    and a tokenizer. cluster: the nodes of your site, for jobs. It prints the commands that use the file, and never
    overwrites one.

    \b
    tpi init recipe
    tpi init sft my_tuning
    tpi init cluster ~/.config/tpi/cluster/mysite.yaml
    """
    if kind not in KINDS:
        raise ConfigError(f"tpi init {kind}: KIND is one of {', '.join(KINDS)}{nearest(kind, KINDS)}")
    chosen = KINDS[kind]
    target = (path or Path(chosen.path)).expanduser()
    ending = "" if chosen.examples else Path(chosen.path).suffix
    if not target.name.endswith(ending):
        raise ConfigError(f"{target}: the name of the file must end in {ending}: tpi init {kind} {target}{ending}")
    try:
        written = _written(kind, target)
    except FileExistsError as error:
        raise ConfigError(f"{error.filename} exists, and nothing is overwritten: tpi init {kind} PATH") from None
    except OSError as error:
        raise ConfigError(f"{error.filename or target}: {error.strerror or error}; tpi init {kind} PATH") from None
    lines = [
        f"wrote {', '.join(map(str, written))}",
        *(f"  {one.format(shlex.quote(str(target)))}" for one in chosen.commands),
    ]
    terminal.print_text("\n".join(lines))


def _written(kind: str, target: Path) -> list[Path]:
    """The files of a kind, each of which was not there. Raises OSError."""
    files = sorted((TEMPLATES / kind).rglob("*.txt"))
    target.parent.mkdir(parents=True, exist_ok=True)
    if not KINDS[kind].examples:
        to = {target: files[0]}
    else:
        target.mkdir()
        to = {target / one.relative_to(TEMPLATES / kind).with_suffix(""): one for one in files}
        shared = TEMPLATES / "examples"
        to |= {target / one.relative_to(shared).with_suffix(""): one for one in sorted(shared.rglob("*.txt"))}
    for file, template in to.items():
        file.parent.mkdir(exist_ok=True)
        with file.open("x", encoding="utf-8") as stream:
            stream.write(template.read_text(encoding="utf-8"))
    return [*to]
