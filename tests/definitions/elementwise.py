# SPDX-License-Identifier: Apache-2.0
"""Elementwise functions of portable/shared_source.py on arrays of numpy, and folds of portable/ieee/math.py.

Every operation is rounded by itself. So this is the definition that the compilers' versions must agree with.
"""

from functools import cache
from types import SimpleNamespace

import numpy as np

from tests.definitions.tensor_core_sum import fma
from tp_invariant_recipes.portable.ieee.math import power_of_two
from tp_invariant_recipes.portable.shared_source import renamed

OWN = {
    "tl": SimpleNamespace(where=np.where, div_rn=lambda a, b: np.float32(a) / b, sqrt_rn=np.sqrt),
    "bits_of": lambda x: np.asarray(x, np.float32).view(np.int32),
    "fp32_of": lambda bits: np.asarray(bits).astype(np.int32).view(np.float32),
    "fma": fma,
    "at_least": lambda x, least: np.where(x < least, least, x),
}


@cache
def version(name):
    return renamed(name, OWN, version)


def numpy_version(name):
    """An elementwise function on arrays of numpy."""

    def quiet(*arguments):
        with np.errstate(all="ignore"):
            return version(name)(*arguments)

    return quiet


def folded(values):
    """[..., n] → [...], rows of any length."""
    size = power_of_two(values.shape[-1])
    values = np.concatenate([values, np.zeros((*values.shape[:-1], size - values.shape[-1]), np.float32)], -1)
    while size > 1:
        size //= 2
        values = values[..., :size] + values[..., size:]
    return values[..., 0]
