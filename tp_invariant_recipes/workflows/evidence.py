"""Judge the evidence of a guard on this machine, for `tpi check EVIDENCE` (docs/guard.md)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_invariant_recipes.compare.compare import EXIT_STATUS, Verdict
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.ledger import evidence
from tp_invariant_recipes.ledger.evidence import Evidence
from tp_invariant_recipes.numerics.mode import find

RECORDED = "the file holds digests or a repetition, and nothing that could be computed again here"


@dataclass(frozen=True)
class JudgedEvidence:
    """The evidence, and what this machine says of it.

    verdict: DIFFERENT: the recorded results are wrong; IDENTICAL: they are what this machine computes.
    how:     what was computed here. tensors: that the file holds, by name.
    """

    evidence: Evidence
    verdict: Verdict
    how: str
    tensors: Mapping[str, Any]

    @property
    def exit_status(self) -> int:
        """Of a comparison."""
        return EXIT_STATUS[self.verdict]

    def text(self) -> str:
        """For people."""
        said = {
            Verdict.DIFFERENT: "different: the recorded bits are wrong",
            Verdict.IDENTICAL: "identical: the recorded bits are right, so that the host that judged them is not",
        }
        return f"{self.evidence.text()}\n{said[self.verdict]} ({self.how})"


def judge(file: Path) -> JudgedEvidence:
    """Compute again what the evidence holds. Raises LedgerError: it is none; RunError: not on this machine."""
    found, tensors = evidence.read(file)
    if found.found_by not in (evidence.PRODUCT, evidence.OPTIMIZER):
        return JudgedEvidence(found, Verdict.DIFFERENT, RECORDED, tensors)
    _check_machine(found)
    try:
        wrong = _product(found, tensors) if found.found_by == evidence.PRODUCT else _update(found, tensors)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError, AssertionError) as error:
        raise RunError(f"{file}: the evidence cannot be computed again: {error!r}") from error
    how = "its definition, computed on this CPU" if not found.machine else "the same library, on this CPU"
    return JudgedEvidence(found, Verdict.DIFFERENT if wrong else Verdict.IDENTICAL, how, tensors)


def _check_machine(found: Evidence) -> None:
    """Raises RunError: this machine may have other bits without being wrong."""
    if not found.machine:
        return
    import torch

    from tp_invariant_recipes.training.guard.fault import machine

    if any(suspect.uuid for suspect in found.suspects):
        raise RunError("a library on a GPU has computed these bits, and only its own repetition could tell")
    there, here = dict(found.machine), machine()
    torch.set_num_threads(max(1, int(there.pop("threads", "1"))))  # by which a library cuts its sums
    unlike = [f"{name} {one} there and {here.get(name)} here" for name, one in there.items() if here.get(name) != one]
    if unlike:
        raise RunError(f"a library has computed these bits, and may have others here: {', '.join(unlike)}")


def _product(found: Evidence, tensors: Mapping[str, Any]) -> bool:
    from tp_invariant_recipes.numerics.products.judge import difference, expected
    from tp_invariant_recipes.numerics.products.sampling import DEFINED, LIBRARY, Sample

    kind, segments = found.details["kind"], tuple(found.details["segments"])
    if kind not in (DEFINED, LIBRARY) or sum(segments) != tensors["a"].shape[1]:
        raise ValueError(f"a product of kind {kind} with segments {segments}")
    a, b, before, out = tensors["a"], tensors["b"], tensors.get("before"), tensors["out"]
    sample = Sample(kind, a, b, before, out, int(found.details["shards"]), segments)
    again = expected(sample)
    if again.shape != sample.out.shape:
        raise ValueError(f"results of shape {list(sample.out.shape)}, not {list(again.shape)}")
    return difference(sample.out, again) is not None


def _update(found: Evidence, tensors: Mapping[str, Any]) -> bool:
    import torch

    from tp_invariant_recipes.portable.training import portable_adam
    from tp_invariant_recipes.training.guard.optimizer import Update

    inputs, results = (
        {n.removeprefix(f"{at}."): t for n, t in tensors.items() if n.startswith(f"{at}.")}
        for at in ("before", "after")
    )
    arithmetic = find(found.numerics)
    stated = arithmetic is not None and arithmetic.any_machine
    kind = portable_adam(torch.optim.AdamW) if stated else torch.optim.AdamW
    group = {k: tuple(v) if isinstance(v, list) else v for k, v in found.details["group"].items()}
    wrapped = kind([torch.nn.Parameter(torch.zeros(1))])
    update = Update(wrapped, {**wrapped.param_groups[0], **group}, float(found.details["updates"]), inputs, results)
    return update.unlike() is not None
