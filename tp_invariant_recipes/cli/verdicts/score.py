"""`tpi score`."""

from pathlib import Path
from typing import Annotated

from tp_invariant_recipes.cli.arguments import Json, Overrides, TrustRecipe, argument, flag, option
from tp_invariant_recipes.cli.output import verdict
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
    against: Annotated[Path | None, option("FILE", "JSONL that an engine returned, or tpi generate.")] = None,
    tolerance: Annotated[float, option("X", "With --against: the largest difference that is none.", min=0.0)] = 0.0,
    partial: Annotated[bool, flag("With --against: accept a file that lacks some scored tokens.", "--partial")] = False,
    ranks: Annotated[bool, flag("Write each token's place among all, by probability.", "--ranks")] = False,
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
    """Write log-probabilities that no layout and no batch changes.

    They depend on weights and tokens alone: the same bytes for every tp, pp, cp, dp, ep, batch, order and padding, and
    with numerics=portable on every machine.
    --against compares what an engine returned (vLLM, SGLang, verl, NeMo-RL) and names what its differences look like.
    The numerics are those of the rollouts, unless typed. After Ctrl-C the same command goes on. Exit status: 0 written,
    and equal or within the tolerance; 1 beyond it; 2 a mistake, or only a part could be compared.

    \b
    tpi score runs/qwen3_8b-tp4-… sequences.jsonl tp=4
    tpi score ~/models/mine sequences.jsonl --out scores.jsonl --ranks
    tpi score ~/models/mine sequences.jsonl --against rollout.jsonl
    tpi score ~/models/mine --against rollouts.jsonl tp=2        # of tpi generate
    """
    needed.check("tpi score", needed.TRAINING)
    from tp_invariant_recipes.features.score import workflow

    words = [*(overrides or [])]
    if file is not None and "=" in str(file) and not file.exists():
        file, words = None, [str(file), *words]
    request = workflow.ScoreRequest(
        source, file, words, out, step, tokenizer, against, tolerance, partial, batch_tokens, ranks, entropy, digest,
        vocab,
    )  # fmt: skip
    verdict.finish(workflow.score(request, terminal.console_of_its_own()), as_json=as_json)
