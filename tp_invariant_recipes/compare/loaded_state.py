"""Compares what a run goes on from with the ledger's line of that step: the loaded state may be another, or damaged."""

from tp_invariant_recipes.compare.explanation import LABELS
from tp_invariant_recipes.ledger.digests import in_order
from tp_invariant_recipes.ledger.schema import COPIES, StepRecord
from tp_invariant_recipes.plural import few

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
        f"the state loaded for step {line.step} is not the one that the ledger has of it: {few(wrong, _NAMED)}"
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
