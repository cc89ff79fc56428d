# SPDX-License-Identifier: Apache-2.0
"""One training and its ledger: `scenario("qwen3_toy", "seq=32 tp=2").ledger()`.

Each distinct command is trained once in a session, whichever tests and workers ask for it.
"""

import fcntl
import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from uuid import uuid4

from tests.forks import Process, Tpi
from tp_invariant_recipes.ledger.open import read

# The control of a test of invariance: only the order of additions differs, since the initial weights are equal.
STOCK = "numerics=deterministic numerics.initial_weights=invariant numerics.virtual_shards=null"


@dataclass(frozen=True)
class Scenario:
    """`tpi train` with these words. Nothing is trained before somebody reads the ledger.

    tpi:   runs commands, in the folder that relative paths in `words` start from.
    runs:  the folder of the run directories; several workers may share it.
    words: the model and overrides, as typed. The last override of a key counts.
    fault: planted in the launcher before it starts. mark: tells a run with a fault from any other.
    """

    tpi: Tpi
    runs: Path
    words: tuple[str, ...] = ()
    fault: Callable[[], None] | None = None
    mark: str = ""

    def __call__(self, *more: str) -> "Scenario":
        """The scenario with more words. more: each one word or several."""
        return replace(self, words=(*self.words, *" ".join(more).split()))

    def planted(self, fault: Callable[[], None]) -> "Scenario":
        """The scenario with a fault. It shares its run with no other scenario."""
        return replace(self, fault=fault, mark=uuid4().hex)

    @property
    def run(self) -> Path:
        """The run directory, which only reading the ledger fills. Copy it before you change it."""
        return self.runs / hashlib.sha256("\0".join((*self.words, self.mark)).encode()).hexdigest()[:16]

    def ledger(self) -> list:
        """The steps. The first call trains."""
        self._train()
        return list(read(self.run).steps)

    def header(self):
        """The header of the ledger."""
        self._train()
        return read(self.run).header

    def compared(self, other: "Scenario", *options: str, status: int | None = None) -> Process:
        """`tpi compare` of the two. status: how it must end; None: anyhow."""
        for item in (self, other):
            item._train()
        return self.tpi("compare", self.run, other.run, *options, status=status)

    def _train(self) -> None:
        complete = self.run.with_suffix(".complete")
        self.runs.mkdir(exist_ok=True)
        with self.run.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                if complete.exists():
                    return
                shutil.rmtree(self.run, ignore_errors=True)  # what a run that failed has left
                self.tpi("train", *self.words, f"run.dir={self.run}", before=self.fault, status=0)
                complete.touch()
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)


def unequal(first: Sequence, other: Sequence) -> list[str]:
    """Where the steps of two ledgers differ, as "step 2: gradients". A ledger holds bits, so a NaN equals itself."""
    assert len(first) == len(other)
    names = [field.name for field in fields(first[0])]
    return [
        f"step {a.step}: {name}"
        for a, b in zip(first, other, strict=True)
        for name in names
        if getattr(a, name) != getattr(b, name)
    ]


def common_groups(scenario: Scenario, layouts: Sequence[str]) -> tuple[str, ...]:
    """The expert groups that suit all layouts, as `tpi verify` chooses them: a word, or none without experts."""
    if not any(name in layout for layout in layouts for name in ("dp=", "cp=", "ep=")):
        return ()
    from tp_invariant_recipes.config.compose import compose
    from tp_invariant_recipes.config.overrides import parse_all

    model, *_ = scenario.words
    results = [compose(model, parse_all(scenario(layout).words[1:]), device="cpu") for layout in layouts]
    wanted = {result.config.numerics.expert_groups for result in results}
    return () if len(wanted) == 1 else (f"numerics.expert_groups={max(wanted)}",)


def agree(scenario: Scenario, layouts: Sequence[str]) -> None:
    """Train in each layout: all ledgers have the same bits, with digests of gradients and master weights."""
    first, *others = map(scenario(*common_groups(scenario, layouts)), layouts)
    ledger = first.ledger()
    for layout, other in zip(layouts[1:], others, strict=True):
        assert unequal(other.ledger(), ledger) == [], layout
    assert all(step.gradients for step in ledger)
    if "precision=fp32" not in first.words:  # where weights have no masters
        assert all(step.masters for step in ledger)
    first.compared(others[0], status=0)


def stock_differs(scenario: Scenario, layouts: Sequence[str]) -> str:
    """The control: with stock numerics two layouts start from equal weights and have gradients of other bits.

    returns: what `tpi compare` says of them.
    """
    first, other = (scenario(STOCK, layout) for layout in layouts)
    assert first.header().initial
    assert first.header().initial == other.header().initial
    assert [step.gradients for step in first.ledger()] != [step.gradients for step in other.ledger()]
    return first.compared(other, status=1).stdout
