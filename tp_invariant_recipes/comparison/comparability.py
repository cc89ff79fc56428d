# SPDX-License-Identifier: Apache-2.0
"""Which bits two runs were promised to share, on different machines and with different definitions of a product.

On different machines: equal ones under numerics=portable, else none. On one machine numerics=tree promises equal bits
for one definition of a product; versions of tpi have others on GPUs (numerics/tree_modes.py).
"""

from tp_invariant_recipes.comparison.explanation import LABELS
from tp_invariant_recipes.ledger.digests import in_order
from tp_invariant_recipes.ledger.run_files import Span, spans, spans_in_words
from tp_invariant_recipes.ledger.schema import CAPABILITY, COPIES, Header, StepRecord
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.text import abbreviated

_NAMED = 5  # tensors in one message
_KINDS = ("masters", "weights", "moments")


def problem(line: StepRecord, loaded: StepRecord) -> str | None:
    """Why training cannot go on after the step of `line`; None: all that the ledger has of it is as it was.

    loaded: the same line with the digests of all weights, of master weights and of moments as they are in memory now.
    """
    wrong = []
    for kind in _KINDS:
        there, here = getattr(line, kind) or {}, getattr(loaded, kind) or {}
        wrong += [f"{kind}/{name}" for name in in_order(there) if here.get(name) != there[name]]
    wrong += [f"{'weights' if kind == COPIES else kind}/{name} (on some ranks)" for kind, name, _ in loaded.diverged]
    if not wrong:
        return None
    return (
        f"the state loaded for step {line.step} is not the one that the ledger has of it: {abbreviated(wrong, _NAMED)}"
        " differ. Training has not gone on, and the ledger is unchanged. Resume from another checkpoint with "
        "checkpoint.ckpt_step=STEP, or begin anew in another run.dir"
    )


def remark(line: StepRecord, loaded: StepRecord) -> str:
    """Return what was compared and what was not, for the log."""
    compared = [LABELS[kind] for kind in _KINDS if getattr(line, kind)]
    follow = ("weights",) if line.masters else ()  # from master weights
    absent = (kind for kind in _KINDS if getattr(loaded, kind) and not getattr(line, kind))
    lacking = [LABELS[kind] for kind in absent if kind not in follow]
    equal = f"step {line.step} as loaded: {', '.join(compared)} equal to the ledger" if compared else ""
    missing = f"not compared, since the ledger has no digests of them: {', '.join(lacking)}" if lacking else ""
    return "; ".join(filter(None, (equal, missing)))


_PRODUCT = "product"  # field of a header's device
# Fields of a header's device that tell architectures apart.
FIELDS = ("name", "compute_capability", "machine", CAPABILITY)


def across_machines(a: Header, b: Header, different: bool) -> str | None:
    """One sentence about two runs on different architectures; None: they ran on the same one, as far as is recorded.

    different: whether a compared bit differs.
    """
    recorded = all(CAPABILITY in header.device for header in (a, b))
    names = FIELDS if recorded else FIELDS[:-1]
    devices = ([header.device.get(name) for name in names] for header in (a, b))
    in_a, in_b = (" ".join(str(value) for value in device if value not in (None, "0.0")) for device in devices)
    modes = {str(header.numerics.get("mode")) for header in (a, b)}
    if in_a == in_b:
        return None
    machines = f"The runs were made on different architectures ({in_a}; {in_b})"
    if not all(map(all_machines, (a, b))):
        named = " and ".join(f"numerics={name}" for name in sorted(modes))
        remark = "this difference is no defect" if different else "these bits are equal all the same"
        return f"{machines}. {named}: equal bits are not promised there, and {remark}; numerics=portable promises them."
    definitions = [header.device.get("attention") for header in (a, b)]
    if definitions[0] != definitions[1]:
        return f"{machines}, by two versions of numerics=portable ({definitions[0]}; {definitions[1]}): not promised."
    if different:
        return (
            f"{machines}. numerics=portable promises equal bits there: one of them does not compute its definition, or "
            f"this is a defect of tpi."
        )
    return f"{machines}, with the equal bits that numerics=portable promises."


def products(header: Header) -> list[Span]:
    """(first step, definition of a product from there on) of a run of numerics=tree on a GPU; empty: any other run."""
    first = header.device.get(_PRODUCT)
    if first is None or not mode.definition(str(header.numerics.get("mode")), "gpu"):
        return []
    return spans(header, lambda changed: str(changed.get(f"device.{_PRODUCT}", first)))


def changed_gemms(before: Header, version: str | None, step: int) -> str | None:
    """Return what to tell a tree run on a GPU that resumes with another definition of a product; None: nothing."""
    earlier = [name for start, name in products(before) if start <= step]
    if not earlier or version is None or earlier[-1] == version:
        return None
    return (
        f"products: up to step {step} their definition is {earlier[-1]}, from step {step + 1} on {version}; the steps "
        f"to come may not be bitwise identical to a run without this change. The ledger records it"
    )


def other_gemms(a: Header, b: Header, step: int | None) -> str | None:
    """One sentence about two tree runs on GPUs whose products have other definitions; None: they have the same.

    step: of the first difference; None: no compared bit differs. A difference before the definitions part is one.
    """
    in_a, in_b = products(a), products(b)
    if not in_a or not in_b or in_a == in_b:
        return None
    parted = min(start for start, _ in {*in_a} ^ {*in_b})
    if step is not None and step < parted:
        return None
    remark = "these bits are equal all the same" if step is None else "this difference is no defect"
    since = "" if parted == 1 else f" from step {parted} on"
    both = f"{spans_in_words(in_a)}; {spans_in_words(in_b)}"
    return f"Products have other definitions{since} ({both}): equal bits are not promised, and {remark}."


def changed_processor(before: Header, now: str, step: int) -> str | None:
    """Return what to tell a run on a CPU that goes on after `step` with other instructions, `now`; None: nothing."""
    earlier = [before.device.get(CAPABILITY)]
    for entry in before.notes.get("resumed", ()):
        if entry["after_step"] < step:
            earlier.append(entry["changed"].get(f"device.{CAPABILITY}", earlier[0]))
    if earlier[-1] in (None, now) or all_machines(before):
        return None
    return (
        f"processor: step {step} was computed with {earlier[-1]}, and step {step + 1} will be with {now}; the steps to "
        f"come may not be bitwise identical to a run without this change. The ledger records it"
    )


def all_machines(header: Header) -> bool:
    """Whether a run's numerics promise equal bits on all machines."""
    return bool((arithmetic := mode.find(str(header.numerics.get("mode")))) and arithmetic.any_machine)
