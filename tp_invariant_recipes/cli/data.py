"""`tpi data`: make the datasets that `tpi train data=text` reads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tp_invariant_recipes.cli.arguments import flag, help_text, option
from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.plural import counted
from tp_invariant_recipes.start import needed

data_app = typer.Typer(help="Turn text into the indexed datasets that Megatron trains on.", no_args_is_help=True)


@data_app.callback()
def data() -> None:
    """Turn text into the indexed datasets that Megatron trains on."""  # keeps `prepare` a command of its own


def prepare(
    source: Annotated[
        Path,
        typer.Argument(help="A file or a folder: text (one document a file) or JSONL (one document a line), also .gz."),
    ],
    output: Annotated[
        Path | None, option("PREFIX", "Write PREFIX.bin, .idx and .json; default data/ and the name of SOURCE.")
    ] = None,
    tokenizer: Annotated[
        str, option(None, "'byte' (ids are UTF-8 bytes, eod is 256), or a local folder with a Hugging Face tokenizer.")
    ] = "byte",
    json_key: Annotated[str, option(None, "The key of the text in a JSONL line.")] = "text",
    as_json: Annotated[bool, flag("Print the result as JSON.", "--json")] = False,
) -> None:
    """Turn SOURCE into an indexed dataset of Megatron.

    If an earlier call was interrupted, the command continues where that one stopped.

    \b
    tpi data prepare ~/books
    tpi data prepare pages.jsonl.gz --output data/pages --json-key body
    """
    needed.check("tpi data prepare", ("megatron.core", "torch"))
    # Imported here so that `tpi --help` does not wait for numpy.
    from tp_invariant_recipes.data.prepare import prepare as prepare_data
    from tp_invariant_recipes.data.source import source_name

    prefix = output or Path("data", source_name(source))
    with _progress_bar(f"preparing {prefix}") as progress:
        prepared = prepare_data(source, prefix, tokenizer=tokenizer, json_key=json_key, progress=progress)
    if as_json:
        terminal.print_json(asdict(prepared) | {"prefix": str(prepared.prefix)})
        return
    terminal.print_text(
        f"{prepared.prefix}: {counted(prepared.documents, 'document')}, {counted(prepared.tokens, 'token')}"
    )
    terminal.print_text(f"tokenizer {prepared.tokenizer}, vocabulary {prepared.vocab_size} with eod {prepared.eod}")
    terminal.print_text(f"digest {prepared.digest}")


data_app.command("prepare", help=help_text(prepare))(prepare)


@contextmanager
def _progress_bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Return a bar on standard error where that is a terminal, else None. Pulses until the bytes are counted."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = terminal.console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
