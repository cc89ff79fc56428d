"""`tpi bisect --referee`: which of two runs is right at the first operation that differs.

Training a run again is the first judge: of two that were recorded, one of which does not repeat itself, the other is
right. Where both repeat, a CPU computes the operation by its definition (workflows/check.py).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tp_invariant_recipes.errors import TpiError
from tp_invariant_recipes.workflows import check

SIDES = ("a", "b")
Train = Callable[[tuple[str, ...], int], Sequence[Path]]


def judge(
    names: Sequence[str], repeats: Sequence[bool], module: str | None, operation: str | None, step: int, train: Train
) -> dict[str, Any]:
    """What the referee says, as `bisect.json` has it: right (of SIDES; empty: it cannot tell, or neither), text.

    names:   of both runs. repeats: whether each computed its recorded bits again.
    module, operation: where the runs first differ; None: not known.
    train:   trains both again, up to `step`, and dumps tensors from another step on; returns the run directories.
    """
    if repeats[0] != repeats[1]:
        one = repeats.index(True)
        return _said([one], f"{names[one]} is right: it repeats its bits here, and {names[1 - one]} does not")
    if module is None or operation is None:
        return _said([], "no operation is known at which the runs part with equal operands: nothing to judge")
    try:
        wanted = check.names_of(module)
        check.require_linear(module, step)
        dumped = train((*wanted.operands, *wanted.results, wanted.weight), step - 1)
        right = [n for n, run in enumerate(dumped) if all(one.identical for one in check.check(run, step, module))]
    except TpiError as error:
        return _said([], f"it cannot tell: {error}")
    how = f"by the definition of {module}, computed on this CPU"
    if len(right) == 1:
        return _said(right, f"{names[right[0]]} is right, and {names[1 - right[0]]} is wrong, {how}")
    return _said(right, f"{'both runs are right' if right else 'neither run is right'}, {how}")


def _said(right: Sequence[int], text: str) -> dict[str, Any]:
    return {"right": [SIDES[n] for n in right], "text": f"referee: {text}"}
