"""`tpi data`: make the datasets that `tpi train data=text` reads."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tp_invariant_recipes.cli.arguments import Json, help_text, option
from tp_invariant_recipes.cli.output import progress
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
    as_json: Json = False,
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
    with progress.slow_progress(terminal.console(stderr=True)) as slow:
        prepared = prepare_data(source, prefix, tokenizer=tokenizer, json_key=json_key, progress=slow.reading(source))
    if as_json:
        terminal.print_json(asdict(prepared) | {"prefix": str(prepared.prefix)})
        return
    terminal.print_text(
        f"{prepared.prefix}: {counted(prepared.documents, 'document')}, {counted(prepared.tokens, 'token')}"
    )
    terminal.print_text(f"tokenizer {prepared.tokenizer}, vocabulary {prepared.vocab_size} with eod {prepared.eod}")
    terminal.print_text(f"digest {prepared.digest}")


data_app.command("prepare", help=help_text(prepare))(prepare)
