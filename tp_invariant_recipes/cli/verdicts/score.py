"""`tpi score`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from tp_invariant_recipes.cli.arguments import Json, Overrides, argument, flag, option
from tp_invariant_recipes.cli.output import verdict
from tp_invariant_recipes.errors import ConfigError, refuse
from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.start import needed


def score(
    source: Annotated[Path, argument("RUN|FOLDER", "A run directory, or a Hugging Face folder.")],
    file: Annotated[
        Path | None,
        argument("SEQUENCES", "JSONL: tokens, text, or prompt and response; default: --against, of tpi generate."),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, option("FILE", "Where to write; default SEQUENCES with .scores.jsonl at its end.")
    ] = None,
    step: Annotated[int | None, option("N", "The run's checkpoint of this step; default: the newest.", min=0)] = None,
    against: Annotated[Path | None, option("FILE", "JSONL that an engine returned, or tpi generate.")] = None,
    tolerance: Annotated[float, option("X", "With --against: the largest difference that is none.", min=0.0)] = 0.0,
    ranks: Annotated[bool, flag("Write each token's place among all, by probability.", "--ranks")] = False,
    entropy: Annotated[bool, flag("Write the entropy of each prediction.", "--entropy")] = False,
    digest: Annotated[bool, flag("Write a digest of the whole vocabulary for each token.", "--digest")] = False,
    vocab: Annotated[
        bool,
        flag("Write the whole vocabulary, OUT.vocab.npy; with --against count entries that differ.", "--vocab"),
    ] = False,
    tokenizer: Annotated[str | None, option("FOLDER", "For text: a Hugging Face tokenizer, or byte.")] = None,
    batch_tokens: Annotated[int, option("N", "Tokens of a forward pass; they change no bit.")] = 16384,
    as_json: Json = False,
) -> None:
    """Write log-probabilities that no layout and no batch changes.

    They depend on weights and tokens alone: the same bytes for every tp, pp, cp, dp, ep, batch, order and padding, and
    with numerics=portable on every machine.
    --against compares what an engine returned (vLLM, SGLang, verl, NeMo-RL) and names what its differences look like.
    After Ctrl-C the same command goes on. Exit status: 0 written, and equal or within the tolerance; 1 beyond it; 2 a
    mistake.

    \b
    tpi score runs/qwen3_8b-tp4-… sequences.jsonl tp=4
    tpi score ~/models/mine sequences.jsonl --out scores.jsonl --ranks
    tpi score ~/models/mine sequences.jsonl --against rollout.jsonl
    tpi score ~/models/mine --against rollouts.jsonl tp=2        # of tpi generate
    """
    needed.check("tpi score", needed.TRAINING)
    _check_options(against, tolerance, vocab=vocab)
    from tp_invariant_recipes.features.score import output

    file, words = _sequences(file, list(overrides or []), against)
    where = out or Path(f"{file.name.removesuffix('.jsonl')}.scores.jsonl")
    output.check(file, against, where)
    output.check_unchanged(where.expanduser())  # before Bridge is imported
    from tp_invariant_recipes.features.score import workflow

    digests = digest or workflow.of_rollouts(file)[1]
    options = workflow.Options(step, tokenizer, batch_tokens, ranks, entropy, digests, vocab, bool(against))
    scoring, result = _score(source, file, words, where, options)
    if against:
        result |= _against(scoring, against, tolerance)
    text = f"{result['text']}\n" if against else ""
    verdict.end(result, result["exit_status"], lambda: terminal.print_text(text, end=""), as_json=as_json)


def _check_options(against: Path | None, tolerance: float, *, vocab: bool) -> None:
    """Raise ConfigError: options of a comparison without one, or without a vocabulary."""
    if against is None and tolerance:
        raise ConfigError("--tolerance goes with --against FILE")
    if vocab:
        from tp_invariant_recipes.features.score import vocabulary

        refuse(vocabulary.check(against))


def _sequences(file: Path | None, words: list[str], against: Path | None) -> tuple[Path, list[str]]:
    """Return the file to score, by default the one to compare with, and the overrides. Raises ConfigError."""
    if file is not None and file.expanduser().is_dir():
        raise ConfigError(f"{file}: a folder, where a file of SEQUENCES comes: tpi score RUN SEQUENCES")
    if file is not None and ("=" not in str(file) or file.exists()):
        return file, words
    if against is None:
        raise ConfigError("name a file of SEQUENCES, or one of tpi generate with --against FILE")
    return against, [*([str(file)] if file else []), *words]


def _score(source: Path, file: Path, overrides: list[str], where: Path, options: Any) -> tuple[Any, dict[str, Any]]:
    """Write what is missing of the scores, and print what was written. returns: the scoring, and its result."""
    from tp_invariant_recipes.features.score import workflow
    from tp_invariant_recipes.launch import progress

    console = terminal.console_of_its_own()
    with progress.busy(console, "reading weights and sequences"):
        scoring = workflow.new(source, file, overrides, where, options)
    result: dict[str, Any] = {"scores": str(scoring.out), "exit_status": 0}
    if not workflow.finished(scoring):
        with progress.Items("scoring", "sequences", scoring.count, console) as bar:
            result |= workflow.execute(scoring, _shown(scoring, bar))
    speed = f", {result['tokens_per_second']:,} tokens/s" if result.get("tokens_per_second") else ""
    terminal.print_line(console, f"{scoring.out}: {scoring.count:,} sequences{speed}")
    return scoring, result


def _against(scoring: Any, against: Path, tolerance: float) -> dict[str, Any]:
    from tp_invariant_recipes.data import sequences
    from tp_invariant_recipes.features.score import against as score_against
    from tp_invariant_recipes.features.score import workflow

    decode = sequences.tokenizer(scoring.tokenizer).decode if scoring.tokenizer else None
    result = score_against.judge(scoring.out, against, tolerance, decode, entries=scoring.options.vocabulary)
    if workflow.has_entropies(scoring):
        return result
    unseen = f"no temperature is looked for: {scoring.out} has no entropies; --entropy with another --out FILE"
    return result | {"text": f"{result['text']}\n{unseen}"}


def _shown(scoring: Any, bar: Any) -> Callable[[], None]:
    """Return what shows the lines that have been written."""
    written, position = 0, 0

    def tick() -> None:
        nonlocal written, position
        if scoring.lines.exists():
            with scoring.lines.open("rb") as stream:
                stream.seek(position)
                while block := stream.read(1 << 20):
                    written += block.count(b"\n")
                position = stream.tell()
            bar.show(written)

    return tick
