# SPDX-License-Identifier: Apache-2.0
"""What a run's weights are taken for: `tpi score`, `tpi generate`, `tpi serve` and `tpi export`."""

from pathlib import Path
from typing import Annotated

import typer

from tp_invariant_recipes.cli import output
from tp_invariant_recipes.cli.arguments import Json, Overrides, TrustRecipe, argument, flag, option
from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.start import needed


def score(
    source: Annotated[Path, argument("RUN|FOLDER", "A run directory, or a Hugging Face folder.")],
    file: Annotated[
        Path | None,
        argument("SEQUENCES", "JSONL: tokens, text, messages, or prompt and response; default: --against."),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, option("FILE", "Where to write; default SEQUENCES with .scores.jsonl at its end.")
    ] = None,
    step: Annotated[int | None, option("N", "The run's checkpoint of this step; default: the newest.", min=0)] = None,
    against: Annotated[Path | None, option("FILE", "JSONL from an engine, or from tpi generate.")] = None,
    tolerance: Annotated[float, option("X", "With --against: the largest difference to accept.", min=0.0)] = 0.0,
    partial: Annotated[bool, flag("With --against: accept a file that lacks some scored tokens.", "--partial")] = False,
    ranks: Annotated[bool, flag("Write each token's rank by probability.", "--ranks")] = False,
    entropy: Annotated[bool, flag("Write the entropy of each prediction.", "--entropy")] = False,
    digest: Annotated[bool, flag("Write a digest of the whole vocabulary for each token.", "--digest")] = False,
    vocab: Annotated[
        bool,
        flag("Write the whole vocabulary, OUT.vocab.npy; with --against count entries that differ.", "--vocab"),
    ] = False,
    tokenizer: Annotated[str | None, option("FOLDER", "For text: a Hugging Face tokenizer, or byte.")] = None,
    batch_tokens: Annotated[int, option("N", "Tokens of a forward pass; they change no bit.")] = 16384,
    _trusted: TrustRecipe = False,
    as_json: Json = False,
) -> None:
    """Write log-probabilities that depend on no layout and no batch.

    They depend on weights and tokens alone: the file is the same for every tp, pp, cp, dp, ep, batch, order and
    padding, and with numerics=portable on every machine. --against compares log-probabilities of an engine (vLLM,
    SGLang, verl, NeMo-RL) and names the likely cause of their differences. tpi takes the numerics from the rollouts,
    unless you type others. After Ctrl-C the same command continues. Exit status: 0 written, and equal or within the
    tolerance; 1 a larger difference; 2 a mistake, or only a subset could be compared.

    \b
    tpi score runs/qwen3_8b-tp4-… sequences.jsonl tp=4
    tpi score ~/models/mine sequences.jsonl --out scores.jsonl --ranks
    tpi score ~/models/mine sequences.jsonl --against rollout.jsonl
    tpi score ~/models/mine --against rollouts.jsonl tp=2        # of tpi generate
    """
    from tp_invariant_recipes.api import commands

    words = [*(overrides or [])]
    if file is not None and "=" in str(file) and not file.exists():
        file, words = None, [str(file), *words]
    result = commands.score(
        source, file, *words, out=out, step=step, against=against, tolerance=tolerance, partial=partial, ranks=ranks,
        entropy=entropy, digest=digest, vocab=vocab, tokenizer=tokenizer, batch_tokens=batch_tokens,
    )  # fmt: skip
    output.finish(result, as_json=as_json)


def generate(
    source: Annotated[Path, argument("RUN|FOLDER", "A run directory, or a Hugging Face folder.")],
    file: Annotated[Path, argument("PROMPTS", "JSONL: prompt (text or ids), tokens, or messages.")],
    overrides: Overrides = None,
    out: Annotated[
        Path | None, option("FILE", "Where to write; default PROMPTS with .rollouts.jsonl at its end.")
    ] = None,
    step: Annotated[int | None, option("N", "The run's checkpoint of this step; default: the newest.", min=0)] = None,
    resume: Annotated[bool, flag("Continue the rollouts in FILE.partial.", "--resume")] = False,
    digest: Annotated[bool, flag("Write a digest of the whole vocabulary for each token.", "--digest")] = False,
    tokenizer: Annotated[str | None, option("FOLDER", "For text: a Hugging Face tokenizer, or byte.")] = None,
    batch: Annotated[int, option("N", "Sequences that are decoded at the same time.", min=1)] = 256,
    chunk: Annotated[int, option("N", "Tokens of a pass over prompts.", min=1)] = 16384,
    cache: Annotated[
        int | None, option("N", "Tokens in the KV cache; default: as many as the requests need and fit.", min=1)
    ] = None,
    graphs: Annotated[bool, typer.Option("--graphs/--no-graphs", help="Decode in CUDA graphs, on a GPU.")] = True,
    dry_run: Annotated[bool, flag("Check everything and write nothing.", "--dry-run")] = False,
    _trusted: TrustRecipe = False,
    as_json: Json = False,
) -> None:
    """Sample completions with the trainer's log-probabilities.

    Tokens and log-probabilities depend on weights, prompts, ids and these keys alone: they are the same for every tp,
    ep, dp, batch, order and machine. numerics=portable is the default. Keys have the names and defaults of
    transformers' generate: max_new_tokens (max_tokens), do_sample, temperature, top_k, top_p, num_return_sequences (n),
    eos_token_id, stop_strings (stop); and seed. A line of PROMPTS may have its own keys. --batch, --chunk, --cache and
    --graphs change no bit. Exit status: 0 written, 2 a mistake, 130 Ctrl-C or SIGTERM: --resume continues.

    \b
    tpi generate ~/models/mine prompts.jsonl do_sample=true top_k=0 n=8 tp=2
    tpi generate runs/qwen3_8b-tp4-… prompts.jsonl --out rollouts.jsonl --resume
    tpi score runs/qwen3_8b-tp4-… --against rollouts.jsonl tp=4
    """
    needed.check("tpi generate", needed.TRAINING)
    from tp_invariant_recipes.features.rollouts import workflow

    engine = {"sequences": batch, "chunk": chunk, "tokens": cache, "graphs": graphs}
    request = workflow.GenerateRequest(source, file, [*(overrides or [])], out, step, tokenizer, digest, resume, engine)
    output.finish(workflow.generate(request, terminal.console_of_its_own(), dry_run=dry_run), as_json=as_json)


def serve(
    source: Annotated[Path, argument("RUN|FOLDER", "A run directory, or a Hugging Face folder.")],
    overrides: Overrides = None,
    host: Annotated[str, option("NAME", "The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, option("N", "The port; 0: any that is free.", min=0, max=65535)] = 30000,
    step: Annotated[int | None, option("N", "The run's checkpoint of this step; default: the newest.", min=0)] = None,
    tokenizer: Annotated[str | None, option("FOLDER", "For text: a Hugging Face tokenizer, or byte.")] = None,
    api_key_file: Annotated[Path | None, option("FILE", "Holds the key that clients have to send.")] = None,
    logs: Annotated[Path | None, option("FOLDER", "Logs of ranks; default: one that goes at the end.")] = None,
    queue: Annotated[int, option("N", "Completions that may be open; 429 for more.", min=1)] = 8192,
    body: Annotated[int, option("N", "Bytes of a request; 413 for more.", min=1)] = 1 << 26,
    batch: Annotated[int, option("N", "Sequences that are decoded at the same time.", min=1)] = 256,
    chunk: Annotated[int, option("N", "Tokens of a pass over prompts.", min=1)] = 16384,
    cache: Annotated[int | None, option("N", "Tokens in the KV cache; default: as many as fit.", min=1)] = None,
    graphs: Annotated[bool, typer.Option("--graphs/--no-graphs", help="Decode in CUDA graphs, on a GPU.")] = True,
    _trusted: TrustRecipe = False,
) -> None:
    """Serve rollouts and scores over HTTP.

    The routes are those of SGLang (/generate, /update_weights_from_disk, …) and OpenAI (/v1/completions,
    /v1/chat/completions), and /score. An answer depends on weights, prompt, id or seed, and its keys alone, never on
    other requests: it has the bits of tpi generate and tpi score, and names the digest of its weights. The server
    refuses keys that it does not know. SIGTERM or Ctrl-C answers the open requests, then ends; a second one ends at
    once. Exit status: 0 all were answered, 2 a mistake or a rank that died, 130 stopped at once.

    \b
    tpi serve ~/models/mine tp=2 --port 30000
    tpi serve runs/qwen3_8b-tp4-… --api-key-file key.txt --host 0.0.0.0
    """
    needed.check("tpi serve", needed.TRAINING)
    needed.check("tpi serve", needed.SERVING)
    from tp_invariant_recipes.features.serve import workflow

    engine = {"sequences": batch, "chunk": chunk, "tokens": cache, "graphs": graphs}
    request = workflow.ServeRequest(
        source, [*(overrides or [])], host, port, step, tokenizer, api_key_file, logs, queue, body, engine
    )
    raise typer.Exit(0 if workflow.serve(request, terminal.console_of_its_own()) else 130)


def export(
    run: Annotated[Path, argument("RUN", "The run directory.")],
    folder: Annotated[Path, argument("FOLDER", "A new or empty folder.")],
    step: Annotated[int | None, option("N", "The checkpoint of this step; default: the newest.", min=0)] = None,
    masters: Annotated[
        bool, flag("Write the optimizer's fp32 master weights, not the bf16 weights.", "--masters")
    ] = False,
    merge: Annotated[
        bool, flag("Of a run with adapters: write the weights with the adapters added.", "--merge")
    ] = False,
    _trusted: TrustRecipe = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint of a run as a Hugging Face folder.

    The folder holds config.json and *.safetensors, and the tokenizer of the folder that the run has started from.
    Transformers loads it, and weights=FOLDER starts another run from it. For a run with LoRA adapters it holds adapters
    that the library peft loads, or whole weights with --merge. Exit status: 0 written, 2 otherwise; then FOLDER is
    unchanged.

    \b
    tpi export runs/qwen3_8b-tp4-… ~/models/mine
    tpi export runs/qwen3_8b-tp4-… ~/models/mine --step 500 --masters
    tpi export runs/my-adapters ~/models/merged --merge
    """
    needed.check("tpi export", needed.TRAINING)
    from tp_invariant_recipes.features.export import workflow

    request = workflow.ExportRequest(run, folder, step, masters, merge)
    output.finish(workflow.export(request, terminal.console_of_its_own()), as_json=as_json)
