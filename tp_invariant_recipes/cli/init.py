"""`tpi init`."""

from pathlib import Path
from typing import Annotated

from tp_invariant_recipes.cli.arguments import argument
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.settings.nearest import nearest

TEMPLATES = Path(__file__).with_name("templates")  # a folder a kind; each file ends in .txt, so that no tool reads it
KINDS = ("recipe", "sft", "lora", "cluster")


def init(
    kind: Annotated[str, argument("WHAT", f"{', '.join(KINDS)}.")],
) -> None:
    """Write a commented recipe or cluster file to begin with.

    recipe: a small model as a recipe of Megatron-Bridge. sft, lora: a folder with a recipe that fine-tunes, examples
    and a tokenizer. cluster: the nodes of your site, for jobs. It prints the commands that use the file, and never
    overwrites one.

    \b
    tpi init recipe
    tpi init sft
    """
    if kind not in KINDS:
        raise ConfigError(f"tpi init {kind}: WHAT is one of {', '.join(KINDS)}{nearest(kind, KINDS)}")
    folder = TEMPLATES / kind
    templates = {template.relative_to(folder).with_suffix(""): template for template in sorted(folder.rglob("*.txt"))}
    top = next(iter(templates)).parts[0]
    if (there := Path(top)).exists() or there.is_symlink():
        raise ConfigError(f"{top} exists, and tpi init overwrites nothing: rename it, or work in another folder")
    try:
        for file, template in templates.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("x", encoding="utf-8") as stream:
                stream.write(template.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    written = [template.read_text(encoding="utf-8").splitlines() for template in templates.values()]
    commands = [line.strip("# ") for lines in written for line in lines if line.strip("# ").startswith("tpi ")]
    terminal.print_text(
        "\n".join([f"wrote {', '.join(map(str, templates))}", *(f"  {command}" for command in commands)])
    )
