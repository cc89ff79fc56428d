"""exp, log, sigmoid and rsqrt of many numbers on a CPU, for a check at the start of a run."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tp_invariant_recipes.kernels.ieee_math import exp, log, rsqrt, sigmoid
from tp_invariant_recipes.kernels.one_source import cpu_loop, numba_version

_exp, _log, _sigmoid, _rsqrt = (numba_version(function.__name__) for function in (exp, log, sigmoid, rsqrt))


def values(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """[n] → [4, n]."""
    out = np.empty((4, x.size), np.float32)
    _fill(x, out)
    return out


@cpu_loop
def _fill(x: Any, out: Any) -> None:
    for i in range(x.size):
        out[0, i], out[1, i], out[2, i], out[3, i] = _exp(x[i]), _log(x[i]), _sigmoid(x[i]), _rsqrt(x[i])
