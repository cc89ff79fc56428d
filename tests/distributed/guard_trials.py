"""Trials of the guard and of Megatron's rerun machine on the same planted faults, as tables.

    python -m tests.distributed.guard_trials shadow|products|state|late|rerun TRIALS FOLDER [ROW]

A row is a kernel, once or always; a cell says how many of its trials a run has noticed, and how many named the rank.
"""

import itertools
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.distributed.guard_faults import Planted
from tests.forks import Tpi

SMALL = ("seq=32", "gbs=2", "model.num_layers=1", "model.vocab_size=512")
DENSE = ("qwen3_toy", *SMALL)
EXPERTS = ("qwen3_moe_toy", *SMALL, "model.hidden_size=64", "model.moe_ffn_hidden_size=64")
SHADOW = ("dp=2", "guard=shadow", "guard.every=2")
PRODUCTS = ("dp=2", "guard=products", "guard.products=4")
RERUN = (
    "dp=2",
    "numerics=stock",
    "rerun_state_machine.check_for_nan_in_loss=true",
    "rerun_state_machine.check_for_spiky_loss=true",
)
RERUN_SAYS = ("Unexpected result", "Possible transient error", "Possible persistent error")  # of a rejected loss
NO_FAULT = "no fault"
PASSES = ("product", "contraction", "attention", "norm", "activation", "experts")


@dataclass(frozen=True)
class Outcome:
    """step: at which a run has noticed its fault; None: it has not. named: whether it named the faulty rank alone.
    repeated: whether a repetition on the same processor had other bits, which is all that torchtitan's replay compares.
    """

    step: int | None
    named: bool = False
    repeated: bool = False


def drawn(kernel: str, number: int, *, always: bool) -> Planted:
    """A fault of this kernel: which launch, element and bit a trial has follows from its number."""
    draw = random.Random(f"{kernel} {always} {number}")
    # Bits that bf16 keeps, or that the optimizer's fp32 has.
    bit = draw.randrange(16, 30) if kernel in ("product", "contraction") else draw.randrange(0, 14)
    width = 4096 if kernel in ("adam", "moment") else 1
    launch = 0 if always else draw.randrange(2)
    step = 2 if kernel != NO_FAULT else 10**6
    return Planted(
        kernel if kernel != NO_FAULT else "product", always, step, 1, launch, draw.randrange(1024), bit, width
    )


def guarded(tpi: Tpi, fault: Planted, *words: str) -> Outcome:
    """Train with a guard."""
    name = f"run-{tpi.count}"
    ended = tpi("train", *words, f"run.dir={name}", before=fault.plant)
    if ended.status == 0:
        shutil.rmtree(tpi.folder / name, ignore_errors=True)
        return Outcome(None)
    assert "wrong bits at step" in ended.stderr, ended.stderr
    step = int(ended.stderr.partition("wrong bits at step ")[2].partition(":")[0])
    named = "one of these" not in ended.stderr and f"\nrank {fault.rank} on " in ended.stderr
    shutil.rmtree(tpi.folder / name, ignore_errors=True)
    return Outcome(step, named, "judged by its own repetition, " in ended.stderr)


def rerun_machine(tpi: Tpi, fault: Planted, mode: str, *words: str) -> Outcome:
    """Train with Megatron's rerun machine, and read what it says in the ranks' logs."""
    name = f"run-{tpi.count}"
    ended = tpi(
        "train", *words, *RERUN, f"rerun_state_machine.rerun_mode={mode}", f"run.dir={name}", before=fault.plant
    )
    logs = "".join(file.read_text(errors="replace") for file in (tpi.folder / name / "logs").glob("rank-*.log"))
    message = [line for line in logs.splitlines() if any(word in line for word in RERUN_SAYS)] + _unlike_norms(logs)
    assert ended.status == 0 or message, ended.stderr
    shutil.rmtree(tpi.folder / name, ignore_errors=True)
    named = any(f"rank {fault.rank}" in line.lower() for line in message)
    return Outcome(fault.step if message else None, named)


def _unlike_norms(logs: str) -> list[str]:
    """In the mode that reports how far repetitions differ: lines about gradient norms that do.

    Losses differ in every run: the machine keeps the tensor that Megatron then divides in place by the tokens.
    """
    pairs = itertools.pairwise(logs.splitlines())
    return [stats for call, stats in pairs if "local grad norm" in call and "rel. variability" in stats]


def row(label: str, outcomes: Sequence[Outcome]) -> str:
    """A line of a table."""
    results = [outcome.step for outcome in outcomes if outcome.step is not None]
    mean = f"{sum(results) / len(results):.1f}" if results else "–"
    named, repeated = (sum(getattr(outcome, name) for outcome in outcomes) for name in ("named", "repeated"))
    return f"| {label} | {len(outcomes)} | {len(results)} | {named} | {repeated} | {mean} |"


def table(title: str, rows: Sequence[tuple[str, Callable[[int], Outcome]]], trials: int) -> list[str]:
    """Its lines, printed as they come."""
    heads = ("fault", "trials", "found", "rank named", "by repetition", "mean step")
    lines = [f"### {title}", f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    print("\n".join(lines), flush=True)
    for label, trial in rows:
        lines.append(row(label, [trial(number) for number in range(trials)]))
        print(lines[-1], flush=True)
    return lines


Trial = Callable[[Tpi, Planted, tuple[str, ...]], Outcome]


def with_guard(steps: int, *words: str) -> Trial:
    """Train so many steps with a guard."""
    return lambda tpi, fault, model: guarded(tpi, fault, *model, f"iters={steps}", *words)


def with_rerun_machine(mode: str) -> Trial:
    """Train Megatron's own layers, of which the invariant numerics have none, with its rerun machine."""
    return lambda tpi, fault, model: rerun_machine(
        tpi, replace(fault, kernel=f"stock {fault.kernel}"), mode, *model, "iters=5"
    )


ONCE, ALWAYS = (False,), (True,)
# Title, kernels, whether a fault comes once or always, and what is trained, by its name in a row.
TABLES: dict[str, tuple[str, tuple[str, ...], tuple[bool, ...], dict[str, Trial]]] = {
    "shadow": (
        "Shadow steps: one wrong bit in step 2, which is one",
        *(PASSES, ONCE + ALWAYS, {"": with_guard(3, *SHADOW)}),
    ),
    "products": (
        "Samples, 4 products a step: one wrong bit at every launch from step 2 on",
        *(("product", "contraction", "attention", "adam", "moment"), ALWAYS, {"": with_guard(60, *PRODUCTS)}),
    ),
    "state": (
        "Weights and the optimizer's state: one wrong bit in each step from step 2 on",
        *(("all-gather", "memory"), ALWAYS, {"": with_guard(60, *PRODUCTS)}),
    ),
    "late": (
        "Shadow steps: one wrong bit of the optimizer's step or in memory, in step 2",
        *(("adam", "moment", "all-gather", "memory"), ONCE, {"": with_guard(5, *SHADOW)}),
    ),
    "rerun": (
        "Megatron's rerun machine, on the faults of the first table",
        *((NO_FAULT, "product", "attention", "norm", "activation"), ONCE + ALWAYS),
        {f", {mode}": with_rerun_machine(mode) for mode in ("validate_results", "report_determinism_stats")},
    ),
}


def rows_of(name: str, tpi: Tpi) -> Iterator[tuple[str, Callable[[int], Outcome]]]:
    """Yield the rows of a table: a label, and what the trial of a number does."""
    _, kernels, kinds, trained = TABLES[name]
    for kernel, always, (words, train) in itertools.product(kernels, kinds, trained.items()):
        model = EXPERTS if kernel == "experts" else DENSE

        def trial(number: int, kernel=kernel, always=always, train=train, model=model) -> Outcome:
            return train(tpi, drawn(kernel, number, always=always), model)

        yield f"{kernel}, {'always' if always else 'once'}{words}", trial


def main(name: str, trials: int, folder: Path, row: str = "") -> None:
    """One table, in a process that has imported Bridge and is forked for every run."""
    folder.mkdir(parents=True, exist_ok=True)
    table(TABLES[name][0], [item for item in rows_of(name, Tpi(folder)) if item[0].startswith(row)], trials)


if __name__ == "__main__":
    from tp_invariant_recipes.start import bridge

    bridge.load()
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
