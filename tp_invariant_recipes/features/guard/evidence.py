# SPDX-License-Identifier: Apache-2.0
"""Judge the evidence of a guard on this machine, for `tpi check EVIDENCE` (docs/guard.md)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, override

from tp_invariant_recipes.comparison.compare import EXIT_STATUS, Verdict
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.ledger import evidence
from tp_invariant_recipes.ledger.evidence import Evidence
from tp_invariant_recipes.numerics.mode import find
from tp_invariant_recipes.reading import Bounds, checked
from tp_invariant_recipes.result import Result

MOST_THREADS = 4096
RECORDED = "the file holds digests or a repetition, and nothing that could be computed again here"


@dataclass(frozen=True)
class JudgedEvidence(Result):
    """The evidence, and what this machine says of it.

    verdict: DIFFERENT: the recorded results are wrong; IDENTICAL: they are what this machine computes;
             NOT_COMPARABLE: the file holds nothing to compute again.
    how:     what was computed here. tensors: that the file holds, by name.
    """

    evidence: Evidence
    verdict: Verdict
    how: str
    tensors: Mapping[str, Any]

    @property
    @override
    def exit_status(self) -> int:
        return EXIT_STATUS[self.verdict]

    @override
    def lines(self) -> Iterator[str]:
        texts = {
            Verdict.DIFFERENT: "different: the recorded bits are wrong",
            Verdict.IDENTICAL: "identical: the recorded bits are right, so that the host that judged them is not",
            Verdict.NOT_COMPARABLE: "not comparable: nothing was computed again",
        }
        yield from (self.evidence.text(), f"{texts[self.verdict]} ({self.how})")

    @override
    def as_json(self) -> dict[str, Any]:
        held = [{"name": n, "dtype": str(t.dtype), "shape": [*t.shape]} for n, t in self.tensors.items()]
        evidence = self.evidence.as_json() | {"tensors": held}
        return {"exit_status": self.exit_status, "how": self.how, "evidence": evidence}


def judge(file: Path) -> JudgedEvidence:
    """Compute again what the evidence holds. Raises LedgerError: it is none; RunError: not on this machine."""
    record, tensors = evidence.read(file)
    if record.detector not in (evidence.PRODUCT, evidence.OPTIMIZER):
        return JudgedEvidence(record, Verdict.NOT_COMPARABLE, RECORDED, tensors)
    _check_machine(record)
    try:
        wrong = _product(record, tensors) if record.detector == evidence.PRODUCT else _update(record, tensors)
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, AssertionError) as error:
        raise RunError(f"{file}: the evidence cannot be computed again: {error!r}") from error
    how = "its definition, computed on this CPU" if not record.machine else "the same library, on this CPU"
    return JudgedEvidence(record, Verdict.DIFFERENT if wrong else Verdict.IDENTICAL, how, tensors)


def _check_machine(record: Evidence) -> None:
    """Raise RunError: this machine may not be bitwise identical without being wrong."""
    if not record.machine:
        return
    import torch

    from tp_invariant_recipes.features.guard.judge import machine

    if any(suspect.uuid for suspect in record.suspects):
        raise RunError("a library on a GPU has computed these bits, and only its own repetition could tell")
    there, here = dict(record.machine), machine()
    threads = there.pop("threads", "1")
    if not (threads.isascii() and threads.isdecimal() and 1 <= int(threads[:5]) <= MOST_THREADS):
        raise RunError(f"the evidence names {threads!r:.40} threads, and a library has 1 to {MOST_THREADS}")
    torch.set_num_threads(int(threads))  # by which a library cuts its sums
    unlike = [
        f"{name} {value} there and {here.get(name)} here" for name, value in there.items() if here.get(name) != value
    ]
    if unlike:
        raise RunError(f"a library has computed these bits, and may have others here: {', '.join(unlike)}")


def _product(record: Evidence, tensors: Mapping[str, Any]) -> bool:
    from tp_invariant_recipes.numerics.gemm.judge import difference, expected
    from tp_invariant_recipes.numerics.gemm.sampling import DEFINED, LIBRARY, Sample

    kind, segments, shards = (record.details[name] for name in ("kind", "segments", "shards"))
    checked(list[Annotated[int, Bounds(ge=1, le=tensors["a"].shape[1])]], segments)
    checked(Annotated[int, Bounds(ge=1, le=min(segments))], shards)
    if kind not in (DEFINED, LIBRARY) or sum(segments) != tensors["a"].shape[1]:
        raise ValueError(f"a product of kind {kind!r:.40} with {len(segments)} segments")
    a, b, before, out = tensors["a"], tensors["b"], tensors.get("before"), tensors["out"]
    chained = bool(record.details.get("chained")) and before is not None
    sample = Sample(kind, a, b, before, out, shards, tuple(segments), chained=chained)
    recomputed = expected(sample)
    if recomputed.shape != sample.out.shape:
        raise ValueError(f"results of shape {list(sample.out.shape)}, not {list(recomputed.shape)}")
    return difference(sample.out, recomputed) is not None


def _update(record: Evidence, tensors: Mapping[str, Any]) -> bool:
    import torch

    from tp_invariant_recipes.features.guard.optimizer import Update
    from tp_invariant_recipes.portable.training import portable_adam

    inputs, results = (
        {n.removeprefix(f"{at}."): t for n, t in tensors.items() if n.startswith(f"{at}.")}
        for at in ("before", "after")
    )
    arithmetic = find(record.numerics)
    stated = arithmetic is not None and arithmetic.any_machine
    kind = portable_adam(torch.optim.AdamW) if stated else torch.optim.AdamW
    group = checked(dict[str, Any], record.details["group"])
    group = {k: tuple(v) if isinstance(v, list) else v for k, v in group.items()}
    updates = checked(Annotated[float, Bounds(ge=0, lt=2**53)], record.details["updates"])
    wrapped = kind([torch.nn.Parameter(torch.zeros(1))])
    update = Update(wrapped, {**wrapped.param_groups[0], **group}, updates, inputs, results)
    return update.unlike() is not None
