# SPDX-License-Identifier: Apache-2.0
"""The public functions that the commands call too: a request is planned, run, and becomes a result.

Overrides are what the command line has: texts ("tp=2"), mappings of dotted keys to values, and keywords (tp=2). A tuple
gives a key several values, as tp=1,2,4 does. Progress goes to standard error, as the commands print it.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from tp_invariant_recipes.errors import ConfigError, LedgerError
from tp_invariant_recipes.ledger import certificate
from tp_invariant_recipes.machine import progress, terminal
from tp_invariant_recipes.machine.progress import busy
from tp_invariant_recipes.result import Result
from tp_invariant_recipes.runs.run import Run
from tp_invariant_recipes.start import needed
from tp_invariant_recipes.text import plural

if TYPE_CHECKING:
    from tp_invariant_recipes.comparison.result import CompareResult
    from tp_invariant_recipes.features.audit.result import AuditResult
    from tp_invariant_recipes.features.audit.resume_result import ResumeResult
    from tp_invariant_recipes.features.bisect.result import BisectResult, NothingToTrain
    from tp_invariant_recipes.features.score.workflow import ScoreResult
    from tp_invariant_recipes.features.verify.verdict import SweepVerdict
    from tp_invariant_recipes.features.verify.workflow import Verification
    from tp_invariant_recipes.launch.plan import Plan
    from tp_invariant_recipes.launch.record import RunRequest

type PathLike = str | os.PathLike[str]
type Overrides = str | Mapping[str, object]


def train(
    model: str | None = None,
    *overrides: Overrides,
    resume: PathLike | None = None,
    continues: bool = False,
    **keys: object,
) -> Run:
    """Train a model on this machine, and record the exact bits of every step. The same as `tpi train`.

    Args:
        model: A model of `tpi models`, or "recipe=NAME"; None with `resume`.
        *overrides: Texts such as "tp=2", or mappings such as {"optimizer.adam_eps": 1e-8}.
        resume: A run directory to continue from its newest finished checkpoint.
        continues: Whether to continue the run in run.dir, where there is one.
        **keys: Keys as keywords, such as tp=2, device="cpu".

    Returns:
        The run. Its exit status is 0, or 130 if Ctrl-C stopped it after a checkpoint.

    Raises:
        TpiError: A mistake, with all `problems`; or the run failed.
    """
    from tp_invariant_recipes.config.overrides import requested
    from tp_invariant_recipes.launch.record import RunRequest

    needed.check("tpi train", needed.TRAINING)
    words = tuple(requested(overrides, keys))
    request = RunRequest(model, words, None if resume is None else Path(resume), continues)
    if request.launcher != "local":
        raise ConfigError(
            f"launcher={request.launcher}: Python trains on this machine; tpi train and tpi submit do that"
        )
    request.check_new_dir()
    return train_here(request, terminal.console_of_its_own())


def train_here(request: "RunRequest", console: Console) -> Run:
    """Plan, check and train a run on this machine. Raises a TpiError."""
    from tp_invariant_recipes.features.train import rank
    from tp_invariant_recipes.features.train.result import start_lines
    from tp_invariant_recipes.launch import ranks
    from tp_invariant_recipes.launch import train as workflow
    from tp_invariant_recipes.launch.progress import preparing, watcher

    composed, interrupted = request.composed(), False
    with workflow.locked_run(request, composed) as lock:
        if lock and lock.remark:
            terminal.print_line(console, lock.remark)
        with preparing(console) as how:
            planned = request.plan(composed, how)
        validate(planned, console)
        terminal.print_all(console, start_lines(planned))
        if not planned.completed:
            with ranks.stopping() as stop, watcher(planned, console) as watch:
                workflow.execute(planned, watch, stop, rank_fn=rank.train)
            interrupted = stop.interrupted
    return Run(planned.run_dir.path, interrupted=interrupted)


def validate(planned: "Plan", console: Console) -> None:
    """Let Megatron-Bridge validate a run that is not completed. Raises ConfigError."""
    from tp_invariant_recipes.launch import train as workflow
    from tp_invariant_recipes.sizing import available_memory

    if planned.completed:
        return
    if tight := available_memory.warning(planned.config, here=planned.here):
        terminal.print_line(console, f"warning: {tight}", "yellow")
    with busy(console, "importing Megatron-Bridge and checking the configuration"):
        remark = workflow.check(planned)
    if remark:
        terminal.print_line(console, f"warning: {remark}", "yellow")


def compare(*runs: PathLike, every: bool = False) -> "CompareResult":
    """Compare runs with the first one, bit for bit. The same as `tpi compare`.

    Args:
        *runs: Two or more of: a run or its directory, a ledger file, a certificate.
        every: Whether the text lists every parameter that differs, not only the first 12.

    Returns:
        The comparisons, with `identical`, `first_difference` and `text`. The exit status is 0 for identical runs, and 1
        for different ones.

    Raises:
        TpiError: A ledger cannot be read, or the runs are of different experiments.
    """
    result = compared(runs, every=every)
    if result.exit_status == 2:
        raise LedgerError(result.text, result.text.splitlines())
    return result


def compared(runs: Sequence[PathLike], *, every: bool = False) -> "CompareResult":
    """Compare runs with the first one, also of different experiments. Raises LedgerError: one cannot be read."""
    from tp_invariant_recipes.comparison.compare import compare_all
    from tp_invariant_recipes.comparison.result import CompareResult
    from tp_invariant_recipes.ledger.open import streamed

    if len(runs) < 2:
        raise LedgerError("a comparison needs two runs: tpi compare RUN_A RUN_B")
    with progress.Counter(terminal.console(stderr=True)) as slow:
        first, *others = [streamed(run, progress=slow.reading(Path(run))) for run in runs]
        return CompareResult(compare_all(first, others, progress=slow.counting("comparing: step")), every)


def verify(
    model: str | None = None,
    *overrides: Overrides,
    against: PathLike | None = None,
    directory: PathLike | None = None,
    exitfirst: bool = False,
    last_failed: bool = False,
    recheck: PathLike | None = None,
    **keys: object,
) -> "SweepVerdict":
    """Train a model in several layouts, and compare their bits. The same as `tpi verify`.

    Args:
        model: A model of `tpi models`, or "recipe=NAME"; None with `last_failed` or `recheck`.
        *overrides: As for `train`; "tp=1,2" gives a key several values.
        against: A run, ledger or certificate to compare all runs with, in place of the first run.
        directory: Where to write; None: a new directory below runs.
        exitfirst: Whether to stop at the first run that fails or differs.
        last_failed: Whether to train again what failed or differed in `directory`, or in the newest below runs.
        recheck: A directory of an earlier verify, to compare its runs again and train nothing.
        **keys: Keys as keywords; a tuple gives several values, such as tp=(1, 2, 4).

    Returns:
        The verdict, with a row for each run in `cells`. The exit status is 0 for identical runs, 1 for different ones,
        and 2 where runs failed or are not comparable.

    Raises:
        TpiError: A mistake, with all `problems`, before anything is trained.
    """
    from tp_invariant_recipes.config.overrides import requested

    words = requested(overrides, keys)
    reference = None if against is None else Path(against)
    where = None if directory is None else Path(directory).expanduser()
    if last_failed:
        if model is not None or words or recheck is not None:
            raise ConfigError(
                "--last-failed takes its runs from a directory of tpi verify: leave MODEL, overrides and --recheck out"
            )
        needed.check("tpi verify --last-failed", needed.TRAINING)
        from tp_invariant_recipes.features.verify import workflow
        from tp_invariant_recipes.runs.sweep_dir import latest

        rerun = partial(workflow.plan_rerun, where or latest(Path("runs")), against=reference)
        return _verified(rerun, exitfirst=exitfirst)
    if recheck is not None:
        if model is not None or words or directory is not None or exitfirst:
            raise ConfigError(
                "--recheck DIR takes its runs from the directory: leave MODEL, overrides, --dir and --exitfirst out"
            )
        from tp_invariant_recipes.features.verify.verdict import judge

        return judge(Path(recheck).expanduser(), reference)
    if model is None:
        raise ConfigError(
            "name a model to verify (tpi models lists them), or a directory to compare again: --recheck DIR"
        )
    needed.check("tpi verify", needed.TRAINING)
    from tp_invariant_recipes.features.verify import workflow

    plan = partial(workflow.new, model, words, against=reference, directory=where)
    return _verified(plan, exitfirst=exitfirst)


def _verified(plan: "Callable[..., Verification | SweepVerdict]", *, exitfirst: bool) -> "SweepVerdict":
    """Plan and check the runs, name those left out, train and judge them. Raises a TpiError.

    plan: takes `how`. It returns the verdict instead where all runs of an earlier verify have passed.
    """
    from tp_invariant_recipes.features.verify import workflow
    from tp_invariant_recipes.launch.progress import headed, preparing
    from tp_invariant_recipes.sizing import available_memory

    console = terminal.console_of_its_own()
    with preparing(console) as how:
        planned = plan(how=how)
    if not isinstance(planned, workflow.Verification):
        terminal.print_line(console, f"every run in {planned.directory} has passed; nothing is trained again")
        return planned
    with busy(console, "importing Megatron-Bridge and checking the configurations"):
        workflow.check(planned)
    for combination in planned.matrix.omitted:
        terminal.print_line(console, f"left out: {combination.label}: {combination.why}")
    for cell in planned.cells:
        if tight := available_memory.warning(planned.plans[cell.name].config, here=True):
            terminal.print_line(console, f"warning: {cell.label}: {tight}", "yellow")
    runs = len(planned.plans)
    terminal.print_line(console, f"{plural(runs, 'run')} in {planned.directory.path}")
    labels = [cell.label for cell in planned.cells]

    def heading(label: str, run: "Plan") -> Text:
        ranks = plural(run.layout.world, f"{run.device} rank")
        number = f"{labels.index(label) + 1} of {len(labels)}"
        return Text(f"{number}: {label}", style="bold") + Text(f" on {ranks}, {plural(run.steps, 'step')}")

    return workflow.execute(planned, headed(console, heading), exitfirst=exitfirst)


def bisect(
    run_a: PathLike, run_b: PathLike, *, directory: PathLike | None = None, referee: bool = False
) -> "BisectResult | NothingToTrain":
    """Find the operation at which two runs first differ, by training the step again. The same as `tpi bisect`.

    Args:
        run_a: A run directory.
        run_b: Another run directory, which differs.
        directory: Where to write; None: a new directory below runs.
        referee: Whether to say which run is right, too.

    Returns:
        What was found. The exit status is 1 if the runs differ, 0 if they do not.

    Raises:
        TpiError: The runs are not comparable, or cannot be trained again here.
    """
    from tp_invariant_recipes.comparison.text import verdict_line
    from tp_invariant_recipes.features.bisect import workflow
    from tp_invariant_recipes.launch.progress import headed

    a, b = (Path(run).expanduser() for run in (run_a, run_b))
    planned = workflow.new(a, b, None if directory is None else Path(directory), referee=referee)
    if isinstance(planned, Result):
        return planned
    needed.check("tpi bisect", needed.TRAINING)
    console = terminal.console_of_its_own()
    terminal.print_line(console, f"recorded: {verdict_line(planned.first)}")
    terminal.print_line(console, f"training step {planned.step} again in {planned.directory.path}")
    return workflow.execute(planned, headed(console, lambda label, _: Text(label, style="bold")))


def certify(
    run: PathLike | None = None,
    *,
    out: PathLike | None = None,
    check: PathLike | None = None,
    expected: str | None = None,
) -> certificate.Certificate:
    """Pack a run into a small file, or check one. The same as `tpi certify`.

    Args:
        run: The run directory to pack.
        out: Where to write; None: NAME.tpicert in the current directory, after the run directory NAME.
        check: A certificate to check; nothing is written then.
        expected: With `check`, the hash that its maker has sent.

    Returns:
        The certificate, with its `path`, `hash` and `summary`.

    Raises:
        TpiError: The run cannot be read, the certificate was altered, or its hash is another one.
    """
    if (run is None) == (check is None):
        raise LedgerError("name a run directory to certify, or a certificate to check: --check FILE")
    if check is not None:
        if out is not None:
            raise LedgerError("--out is where a new certificate goes; --check makes none")
        return certificate.check_hash(Path(check).expanduser(), expected)
    if expected is not None:
        raise LedgerError("--hash is for checking a certificate: --check FILE --hash HASH")
    assert run is not None, "checked above"
    return certificate.write(Path(run), None if out is None else Path(out).expanduser())


def score(
    source: PathLike,
    sequences: PathLike | None = None,
    *overrides: Overrides,
    out: PathLike | None = None,
    step: int | None = None,
    against: PathLike | None = None,
    tolerance: float = 0.0,
    partial: bool = False,
    ranks: bool = False,
    entropy: bool = False,
    digest: bool = False,
    vocab: bool = False,
    tokenizer: str | None = None,
    batch_tokens: int = 16384,
    **keys: object,
) -> "ScoreResult":
    """Write log-probabilities of sequences that no layout and no batch changes. The same as `tpi score`.

    Args:
        source: A run directory, or a Hugging Face folder.
        sequences: JSONL with tokens, text, messages, or prompt and response; None: `against`, of `tpi generate`.
        *overrides: As for `train`.
        out: Where to write; None: `sequences` with .scores.jsonl at its end.
        step: The run's checkpoint of this step; None: the newest.
        against: JSONL that an engine returned, to compare with.
        tolerance: With `against`, the largest difference that is none.
        partial: With `against`, whether the file may lack some scored tokens.
        ranks: Whether to write each token's rank by probability.
        entropy: Whether to write the entropy of each prediction.
        digest: Whether to write a digest of the whole vocabulary for each token.
        vocab: Whether to write the whole vocabulary.
        tokenizer: For text, a Hugging Face tokenizer, or "byte"; None: the source's.
        batch_tokens: Tokens of a forward pass; they change no bit.
        **keys: Keys as keywords.

    Returns:
        The path of the scores, and the comparison. The exit status is 0 if they are equal or within the tolerance,
        1 beyond it, 2 where only a part could be compared.

    Raises:
        TpiError: A mistake, with all `problems`; or the scoring was stopped.
    """
    from tp_invariant_recipes.config.overrides import requested, texts
    from tp_invariant_recipes.features.score import workflow

    needed.check("tpi score", needed.TRAINING)
    file, other, written = (None if path is None else Path(path) for path in (sequences, against, out))
    request = workflow.ScoreRequest(
        Path(source), file, texts(requested(overrides, keys)), written, step, tokenizer, other, tolerance, partial,
        batch_tokens, ranks, entropy, digest, vocab,
    )  # fmt: skip
    return workflow.score(request, terminal.console_of_its_own())


def audit(
    model: str,
    *overrides: Overrides,
    reference: Sequence[str] = (),
    against: Sequence[str] = (),
    resume_at: int | None = None,
    card: bool = False,
    keep: bool = False,
    directory: PathLike | None = None,
    **keys: object,
) -> "AuditResult | ResumeResult":
    """Find out whether a layout is wrong, or only rounds otherwise. The same as `tpi audit MODEL`.

    Args:
        model: A model of `tpi models`, or "recipe=NAME".
        *overrides: As for `train`.
        reference: Overrides of the reference alone, such as ["tp=2"].
        against: Overrides of the audited training alone; then the reference is the model as given.
        resume_at: Audit a resume at this step instead of the layout: is every state restored?
        card: With `resume_at`, whether to write the item `checkpoint_resume` of a verification card.
        keep: Whether to keep the run directories even if nothing is wrong.
        directory: Where to write; None: a new directory below runs.
        **keys: Keys as keywords.

    Returns:
        What was found. The exit status is 0 within rounding, 1 beyond it, 2 where it is not known; of a resume 0 if it
        is whole, 1 if it differs, 2 where it is not known.

    Raises:
        TpiError: A mistake, with all `problems`; or a training failed.
    """
    from tp_invariant_recipes.config.overrides import requested
    from tp_invariant_recipes.features.audit import resume, workflow
    from tp_invariant_recipes.launch.progress import headed, preparing

    needed.check("tpi audit", needed.TRAINING)
    words = requested(overrides, keys)
    console, where = terminal.console_of_its_own(), None if directory is None else Path(directory)
    plan: Callable[..., Any] = partial(workflow.new, reference=reference, against=against)
    check: Callable[..., None] = workflow.check
    execute: Callable[..., AuditResult | ResumeResult] = partial(workflow.execute, keep=keep)
    if resume_at is not None:
        if wrong := [*reference, *against]:
            raise ConfigError(f"--resume-at compares a training with itself in one layout; leave out {' '.join(wrong)}")
        plan = partial(resume.new, at=resume_at)
        check, execute = resume.check, partial(resume.execute, keep=keep, card=card)
    with preparing(console) as how:
        planned = plan(model, words, directory=where, how=how)
    with busy(console, "importing Megatron-Bridge and checking the configurations"):
        check(planned)
    sizes = (planned.disk, planned.host) if resume_at is None else ()
    told = ": about {} of recordings; they take {} of host memory" if sizes else ""
    told = told.format(*(f"{size / 2**30:.2g} GiB" for size in sizes))
    terminal.print_line(console, f"audit directory {planned.directory.path}{told}")
    watch = headed(
        console, lambda name, run: Text(name, style="bold") + Text(f", {plural(run.steps - run.start, 'step')}")
    )
    return execute(planned, watch)
