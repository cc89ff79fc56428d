"""Trials of the guard and of Megatron's rerun machine on the same planted faults, as tables.

    python -m tests.distributed.guard_trials shadow|products|state|late|rerun TRIALS FOLDER [ROW]

A row is a kernel, once or always; a cell says how many of its trials a run has noticed, and how many named the rank.
"""

import itertools
import random
import shutil
import sys
from collections.abc import Callable, Sequence
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


def drawn(kernel: str, number: int, *, always: bool, step: int = 2) -> Planted:
    """A fault of this kernel: which launch, element and bit a trial has follows from its number."""
    draw = random.Random(f"{kernel} {always} {number}")
    # Bits that bf16 keeps, or that the optimizer's fp32 has.
    bit = draw.randrange(16, 30) if kernel in ("product", "contraction") else draw.randrange(0, 14)
    width = 4096 if kernel in ("adam", "moment") else 1
    launch = 0 if always else draw.randrange(2)
    step = step if kernel != NO_FAULT else 10**6
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


def model_of(kernel: str) -> tuple[str, ...]:
    """A model that has the kernel."""
    return EXPERTS if kernel == "experts" else DENSE


def shadow_rows(tpi: Tpi) -> list[tuple[str, Callable[[int], Outcome]]]:
    """Faults in a shadow step, step 2."""

    def trial(kernel: str, always: bool) -> Callable[[int], Outcome]:
        return lambda n: guarded(tpi, drawn(kernel, n, always=always), *model_of(kernel), "iters=3", *SHADOW)

    return [
        (f"{kernel}, {'always' if always else 'once'}", trial(kernel, always))
        for kernel in PASSES
        for always in (False, True)
    ]


def product_rows(tpi: Tpi) -> list[tuple[str, Callable[[int], Outcome]]]:
    """A permanent fault, noticed by samples within 60 steps."""

    def trial(kernel: str) -> Callable[[int], Outcome]:
        return lambda n: guarded(tpi, drawn(kernel, n, always=True), *model_of(kernel), "iters=60", *PRODUCTS)

    return [
        (f"{kernel}, always", trial(kernel)) for kernel in ("product", "contraction", "attention", "adam", "moment")
    ]


def state_rows(tpi: Tpi) -> list[tuple[str, Callable[[int], Outcome]]]:
    """What lies in memory, noticed within 60 steps."""

    def trial(kernel: str) -> Callable[[int], Outcome]:
        return lambda n: guarded(tpi, drawn(kernel, n, always=True), *DENSE, "iters=60", *PRODUCTS)

    return [(f"{kernel}, always", trial(kernel)) for kernel in ("all-gather", "memory")]


def late_rows(tpi: Tpi) -> list[tuple[str, Callable[[int], Outcome]]]:
    """What no shadow step repeats, wrong once in step 2, which is one."""

    def trial(kernel: str) -> Callable[[int], Outcome]:
        return lambda n: guarded(tpi, drawn(kernel, n, always=False), *DENSE, "iters=5", *SHADOW)

    return [(f"{kernel}, once", trial(kernel)) for kernel in ("adam", "moment", "all-gather", "memory")]


def rerun_rows(tpi: Tpi) -> list[tuple[str, Callable[[int], Outcome]]]:
    """Megatron's machine on such faults of its own layers: the invariant numerics refuse it."""

    def trial(kernel: str, always: bool, mode: str) -> Callable[[int], Outcome]:
        def run(n: int) -> Outcome:
            fault = drawn(kernel, n, always=always)
            fault = replace(fault, kernel=f"stock {fault.kernel}")
            return rerun_machine(tpi, fault, mode, *DENSE, "iters=5")

        return run

    return [
        (f"{kernel}, {'always' if always else 'once'}, {mode}", trial(kernel, always, mode))
        for kernel in (NO_FAULT, "product", "attention", "norm", "activation")
        for always in (False, True)
        for mode in ("validate_results", "report_determinism_stats")
    ]


TABLES: dict[str, tuple[str, Callable[[Tpi], list[tuple[str, Callable[[int], Outcome]]]]]] = {
    "shadow": ("Shadow steps: one wrong bit in step 2, which is one", shadow_rows),
    "products": ("Samples, 4 products a step: one wrong bit at every launch from step 2 on", product_rows),
    "state": ("Weights and the optimizer's state: one wrong bit in each step from step 2 on", state_rows),
    "late": ("Shadow steps: one wrong bit of the optimizer's step or in memory, in step 2", late_rows),
    "rerun": ("Megatron's rerun machine, on the faults of the first table", rerun_rows),
}


def main(name: str, trials: int, folder: Path, row: str = "") -> None:
    """One table, in a process that has imported Bridge and is forked for every run."""
    folder.mkdir(parents=True, exist_ok=True)
    title, rows = TABLES[name]
    table(title, [item for item in rows(Tpi(folder)) if item[0].startswith(row)], trials)


if __name__ == "__main__":
    from tp_invariant_recipes.start import bridge

    bridge.load()
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
