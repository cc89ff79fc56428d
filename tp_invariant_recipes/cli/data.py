"""`tpi data`: make the datasets that `tpi train data=text` reads."""

from pathlib import Path
from typing import Annotated

import typer

from tp_invariant_recipes.cli.arguments import Json, help_text, option
from tp_invariant_recipes.machine import progress, terminal
from tp_invariant_recipes.text import counted

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
        Path | None, option("PREFIX", "Write PREFIX.bin and .idx; default data/ and the name of SOURCE.")
    ] = None,
    tokenizer: Annotated[
        str, option(None, "'byte' (ids are UTF-8 bytes, eod is 256), or a local folder with a Hugging Face tokenizer.")
    ] = "byte",
    json_key: Annotated[str, option(None, "The key of the text in a JSONL line.")] = "text",
    as_json: Json = False,
) -> None:
    """Turn SOURCE into an indexed dataset of Megatron.

    If a folder has JSONL files, the command reads only these, and lists the files that it leaves out. It writes the
    whole dataset or nothing. For more than 10 GB use Megatron's preprocess_data, whose datasets tpi accepts.

    \b
    tpi data prepare ~/books
    tpi data prepare pages.jsonl.gz --output data/pages --json-key body
    """
    from tp_invariant_recipes.data import text  # numpy

    corpus = text.select(source)
    console = terminal.console(stderr=True)
    terminal.print_line(console, f"reading {corpus}")
    with progress.Counter(console) as slow:
        prefix = output or Path("data", text.plain_name(source))
        made = text.prepare(source, prefix, tokenizer, json_key, slow.reading(source))
    if as_json:
        left_out = {"left_out": [*corpus.left]}
        terminal.print_json({"prefix": str(prefix), "tokenizer": tokenizer} | made.as_json() | left_out)
        return
    terminal.print_text(f"{prefix}: {counted(made.documents, 'document')}, {counted(made.tokens, 'token')}")
    terminal.print_text(f"digest {made.digest}")
    named = "" if tokenizer == "byte" else f" data.tokenizer={tokenizer}"
    terminal.print_text(f"train on it: tpi train MODEL data=text data.path={prefix}{named}")


data_app.command("prepare", help=help_text(prepare))(prepare)
