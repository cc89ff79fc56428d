"""numerics=portable: arithmetic that is stated to the last bit, so that every machine that computes it has one ledger.

`DEFINITION` is the version of all statements together: kernels/tensor_core_sum.py (products), kernels/ieee_*.py (all
else), and the orders of sums across shards (numerics/tree.py). Whoever changes one of them so that a bit changes raises
it; ledgers of two versions are not promised to be equal.
"""

import hashlib
from functools import cache

import numpy as np
import torch

from tp_invariant_recipes.errors import RunError

DEFINITION = 1
# SHA-256 of the bits of exp, log, sigmoid and rsqrt for the numbers of `samples`.
FUNCTIONS = "846d22461f784babf1b0e91afdaa81327c9c205d8f7b2a89c1190e3a4aa354e2"
LONGEST = 4096  # of the recorded cases' k; longer ones take too long at every start, tests have them


@cache
def require_conformance() -> None:
    """Compute recorded cases as a run would, once a process. Raises RunError where a bit differs: with the case."""
    from tp_invariant_recipes.numerics import conformance
    from tp_invariant_recipes.numerics.defined_product import way

    recording = conformance.read()
    cases = tuple(case for case in recording.cases if case.a.dtype == torch.bfloat16 and case.a.shape[1] <= LONGEST)
    found = conformance.differences(conformance.Recording(recording.gpu, cases), way("cpu").compute)
    different = [str(one) for one in found]
    if functions() != FUNCTIONS:
        different.append("exp, log, sigmoid or rsqrt: other bits than those of kernels/ieee_math.py")
    if different:
        more = f"; and {len(different) - 2} more" if len(different) > 2 else ""
        raise RunError(
            "numerics=portable: this CPU computes other bits than the definition, so the run's ledger would hold for "
            f"this machine only: {'; '.join(different[:2])}{more}; or numerics=tree"
        )


def functions() -> str:
    """The hash that FUNCTIONS must be."""
    from tp_invariant_recipes.kernels import ieee_samples

    values = ieee_samples.values(samples())
    bits = np.where(np.isnan(values), np.uint32(0x7FFFFFFF), values.view(np.uint32))
    return hashlib.sha256(bits.tobytes()).hexdigest()


def samples() -> np.ndarray:
    """fp32 numbers of all magnitudes and both signs, subnormal ones, infinities and NaN too."""
    return np.arange(0, 2**32, 2**32 // 509, dtype=np.uint64).astype(np.uint32).view(np.float32)
