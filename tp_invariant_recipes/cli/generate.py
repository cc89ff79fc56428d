"""`tpi generate`."""

from pathlib import Path
from typing import Annotated

import typer

from tp_invariant_recipes.cli.arguments import Json, Overrides, TrustRecipe, argument, flag, option
from tp_invariant_recipes.cli.output import verdict
from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.start import needed


def generate(
    source: Annotated[Path, argument("RUN|FOLDER", "A run directory, or a Hugging Face folder.")],
    file: Annotated[Path, argument("PROMPTS", "JSONL: prompt (text or ids), tokens, or messages.")],
    overrides: Overrides = None,
    out: Annotated[
        Path | None, option("FILE", "Where to write; default PROMPTS with .rollouts.jsonl at its end.")
    ] = None,
    step: Annotated[int | None, option("N", "The run's checkpoint of this step; default: the newest.", min=0)] = None,
    resume: Annotated[bool, flag("Continue what FILE.partial has of the same rollouts.", "--resume")] = False,
    digest: Annotated[bool, flag("Write a digest of the whole vocabulary for each token.", "--digest")] = False,
    tokenizer: Annotated[str | None, option("FOLDER", "For text: a Hugging Face tokenizer, or byte.")] = None,
    batch: Annotated[int, option("N", "Sequences that are decoded side by side.", min=1)] = 256,
    chunk: Annotated[int, option("N", "Tokens of a pass over prompts.", min=1)] = 16384,
    cache: Annotated[
        int | None, option("N", "Tokens that the cache holds; default: what the requests need and fits.", min=1)
    ] = None,
    graphs: Annotated[bool, typer.Option("--graphs/--no-graphs", help="Decode in CUDA graphs, on a GPU.")] = True,
    dry_run: Annotated[bool, flag("Check everything and write nothing.", "--dry-run")] = False,
    _trusted: TrustRecipe = False,
    as_json: Json = False,
) -> None:
    """Sample completions with the trainer's own bits.

    Tokens and log-probabilities depend on weights, prompts, ids and these keys alone: the same bytes for every tp, ep,
    dp, batch, order and machine. numerics=portable is the default. Keys have the names and defaults of transformers'
    generate: max_new_tokens (max_tokens), do_sample, temperature, top_k, top_p, num_return_sequences (n), eos_token_id,
    stop_strings (stop); and seed. A line of PROMPTS may have its own. --batch, --chunk, --cache and --graphs change no
    bit. Exit status: 0 written, 2 a mistake, 130 Ctrl-C or SIGTERM: --resume continues.

    \b
    tpi generate ~/models/mine prompts.jsonl do_sample=true top_k=0 n=8 tp=2
    tpi generate runs/qwen3_8b-tp4-… prompts.jsonl --out rollouts.jsonl --resume
    tpi score runs/qwen3_8b-tp4-… --against rollouts.jsonl tp=4
    """
    needed.check("tpi generate", needed.TRAINING)
    from tp_invariant_recipes.features.rollouts import workflow

    engine = {"sequences": batch, "chunk": chunk, "tokens": cache, "graphs": graphs}
    request = workflow.GenerateRequest(source, file, [*(overrides or [])], out, step, tokenizer, digest, resume, engine)
    verdict.finish(workflow.generate(request, terminal.console_of_its_own(), dry_run=dry_run), as_json=as_json)
