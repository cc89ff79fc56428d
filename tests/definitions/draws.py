# SPDX-License-Identifier: Apache-2.0
"""The definition of draws (portable/ieee/draw.py), a token at a time: whole numbers of Python, and fp32 in numpy."""

from fractions import Fraction
from math import ceil

import numpy as np

from tests.definitions.elementwise import numpy_version

MASK = 0xFFFFFFFF


def philox(key, counter):
    """One block of Philox4x32-10: four words. key: 64 bits; counter: four words."""
    k0, k1 = key & MASK, key >> 32 & MASK
    c0, c1, c2, c3 = counter
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & MASK, (a >> 32) ^ c3 ^ k1, a & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def word(key, sample, position, token):
    group, place = divmod(token, 4096)
    lane, column = divmod(place, 1024)
    return philox(key, (1024 * group + column, sample, position, 0))[lane]


def ordered(row):
    """Token ids: the most probable first, of equals the least id."""
    return sorted(range(len(row)), key=lambda token: (-float(row[token]), token))


def weights(row, temperature):
    return numpy_version("weight")(row, row.max(), np.float32(temperature))


def kept(row, sampling):
    """The tokens that top-k and top-p leave, in order."""
    tokens = ordered(row)
    if sampling.top_k > 0:
        least = row[tokens[: sampling.top_k][-1]]
        tokens = [token for token in tokens if row[token] >= least]
    if sampling.top_p < 1:
        masses = [int(Fraction(float(w)) * 2**40) for w in weights(row, sampling.temperature)]
        need = ceil(float(sum(masses[token] for token in tokens)) * sampling.top_p)
        mass = 0
        for place, token in enumerate(tokens):
            if mass >= need:
                return tokens[:place]
            mass += masses[token]
    return tokens


def drawn(row, key, sampling):
    """The token of a row of fp32. key: of the request, sample, position."""
    if not sampling.do_sample:
        return ordered(row)[0]
    tokens = kept(row, sampling)
    words = np.array([word(*key, token) for token in tokens], np.uint32).view(np.int32)
    heavy = weights(row, sampling.temperature)[tokens]
    with np.errstate(all="ignore"):
        results = heavy / numpy_version("waiting_time")(words)
    return min(token for token, result in zip(tokens, results, strict=True) if result == results.max())
