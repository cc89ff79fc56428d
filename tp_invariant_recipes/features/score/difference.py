# SPDX-License-Identifier: Apache-2.0
"""How far an engine's log-probabilities are from the reference's, and what the differences look like.

d = engine - reference, of a token that the engine drew. Mean KL of engine and reference, as Schulman estimates it
(joschu.net/blog/kl-approx.html):

    k1 = d        k3 = exp(-d) - 1 + d        ratio = exp(-d), the reference's probability over the engine's
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tp_invariant_recipes.features.score.engine_scores import LEAST
from tp_invariant_recipes.text import plural

LOW, HIGH = 0.8, 1.25  # of a probability ratio that leaves no clip range untouched
WORST = 20
ROUNDING = 0.05  # a mean |d| that bf16 alone may give; what is larger has another cause
SHIFTED = 0.1  # of the mean |d|, where the values of a neighbouring token fit
EXPLAINED = 0.9  # of the squares of d, by a temperature; of the sum of |d|, by few tokens
FEW = 0.05  # of all tokens
GROWS = 4.0  # times: the last quarter of positions over the first


@dataclass(frozen=True)
class Columns:
    """Compared tokens, an entry of each array for each. sequence: index of its sequence. entropy: NaN: not known."""

    sequence: np.ndarray
    position: np.ndarray
    token: np.ndarray
    reference: np.ndarray
    engine: np.ndarray
    entropy: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence["Columns"]) -> "Columns":
        """Return the tokens of all, one part after the other."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    @property
    def difference(self) -> np.ndarray:
        """d of each token, fp64."""
        return self.engine - self.reference


def summary(columns: Columns) -> dict[str, Any]:
    """Return the figures of all tokens."""
    d, size = columns.difference, np.abs(columns.difference)
    ratio = np.exp(np.clip(-d, -50, 50))
    outside = (ratio < LOW) | (ratio > HIGH)
    return {
        "tokens": len(d),
        "equal": int((d == 0).sum()),
        "k1": float(d.mean()),
        "k3": float((np.expm1(np.clip(-d, -50, 50)) + d).mean()),
        "mean": float(size.mean()),
        "largest": float(size.max()),
        "p999": float(np.quantile(size, 0.999)),
        "outside": int(outside.sum()),
        "outside_share": float(outside.mean()),
    }


def by_position(columns: Columns) -> list[dict[str, Any]]:
    """Mean, 99th percentile and largest |d| of positions 1, 2-3, 4-7, 8-15 …"""
    size, bins = np.abs(columns.difference), np.log2(columns.position).astype(int)
    return [
        {"from": 1 << n, "to": (2 << n) - 1, "tokens": len(part), "mean": float(part.mean()),
         "p99": float(np.quantile(part, 0.99)), "largest": float(part.max())}
        for n in sorted(set(bins.tolist()))
        if len(part := size[bins == n])
    ]  # fmt: skip


def by_token(columns: Columns) -> list[dict[str, Any]]:
    """Return the tokens that most of the sum of |d| comes from."""
    size = np.abs(columns.difference)
    tokens, at = np.unique(columns.token, return_inverse=True)
    sums, counts = np.bincount(at, size), np.bincount(at)
    order = np.argsort(-sums, kind="stable")[:WORST]
    return [{"token": int(tokens[n]), "count": int(counts[n]), "mean": float(sums[n] / counts[n])} for n in order]


def worst(columns: Columns) -> list[dict[str, Any]]:
    """Return the tokens with the largest |d|. sequence: index of it."""
    order = np.argsort(-np.abs(columns.difference), kind="stable")[:WORST]
    return [
        {"sequence": int(columns.sequence[n]), "position": int(columns.position[n]), "token": int(columns.token[n]),
         "reference": float(columns.reference[n]), "engine": float(columns.engine[n])}
        for n in order
    ]  # fmt: skip


def suspects(columns: Columns) -> list[str]:
    """Describe what the differences look like; empty where they are as small as rounding.

    Values that are no logarithm of a probability come first, and count for nothing else.
    """
    if not columns.difference.any():
        return []
    if units := [*_units(columns)]:
        return units
    found, columns = _special_values(columns)
    if not columns.difference.any():
        return found
    likely, size = [*_shifted(columns), *_temperature(columns)], np.abs(columns.difference)
    if not likely and size.mean() > ROUNDING:
        likely = [*_few_tokens(size)] or [*_growing(columns)] or [
            f"no cause looked for fits: the mean difference is {size.mean():.3g}, at all positions alike, as of other "
            "weights or another formula of a layer"
        ]  # fmt: skip
    return found + likely


def _units(columns: Columns) -> Iterator[str]:
    """Yield what the engine's values are if they are the reference's in other units."""
    reference, engine = columns.reference, columns.engine
    nearest = SHIFTED * np.abs(columns.difference).mean()
    for values, what in (
        (np.exp(reference), "probabilities, not their logarithms"),
        (-reference, "negative log-probabilities, without their sign"),
        (reference / np.log(2), "logarithms to base 2"),
        (reference / np.log(10), "logarithms to base 10"),
    ):
        if np.abs(engine - values).mean() < nearest:
            yield f"the engine's values are {what}"
            return
    if (engine > 0).any():
        yield f"{plural(int((engine > 0).sum()), 'value')} of the engine above 0: none is a log-probability"


def _special_values(columns: Columns) -> tuple[list[str], Columns]:
    """Name values that an engine writes where it has none, and return the other tokens."""
    last = np.append(columns.sequence[1:] != columns.sequence[:-1], [True])
    zero = (columns.engine == 0) & (columns.reference < -ROUNDING)
    minus = columns.engine <= LEAST
    ends = f", {int((zero & last).sum())} of them the last of a sequence" if (zero & last).any() else ""
    found = [
        f"{plural(int(tokens.sum()), 'token')} with {value}{why}"
        for tokens, value, why in (
            (
                zero,
                "0.0",
                f"{ends}: the engine has not scored them (padding, tools, an end); mask them, or write null",
            ),
            (
                minus,
                "-inf",
                ": a filter such as top_k has left them no probability; take the values before it",
            ),
        )
        if tokens.any()
    ]
    kept = ~(zero | minus)
    return found, Columns(*(getattr(columns, field.name)[kept] for field in fields(columns)))


def _few_tokens(size: np.ndarray) -> Iterator[str]:
    """Yield that few tokens have nearly all of the differences."""
    largest = np.sort(size)[::-1]
    number = int(np.searchsorted(np.cumsum(largest), EXPLAINED * size.sum())) + 1
    if number <= FEW * len(size):
        yield (
            f"{plural(number, 'token')} of {len(size)} {'has' if number == 1 else 'have'} {EXPLAINED:.0%} of the "
            "differences; no cause looked for fits them"
        )


def _shifted(columns: Columns) -> Iterator[str]:
    """Yield the values of the token before or after stand at a token's place."""
    same = columns.sequence[1:] == columns.sequence[:-1]
    same &= columns.position[1:] == columns.position[:-1] + 1
    if not same.any():
        return
    for engine, reference, word in (
        (columns.engine[:-1], columns.reference[1:], "next"),
        (columns.engine[1:], columns.reference[:-1], "previous"),
    ):
        if np.abs(engine - reference)[same].mean() < SHIFTED * np.abs(columns.difference).mean():
            yield f"off by one: each token has the log-probability of the {word} token"


def _temperature(columns: Columns) -> Iterator[str]:
    """log p at temperature T is, near 1, log p + (1/T - 1)(log p + entropy): the slope is known of every token."""
    slope, d = columns.reference + columns.entropy, columns.difference
    if not np.isfinite(slope).all() or not slope.any():
        return
    beta = float((slope * d).sum() / (slope * slope).sum())
    explained = 1 - float(np.square(d - beta * slope).sum() / np.square(d).sum())
    if explained >= EXPLAINED and beta > -1:
        yield (
            f"a temperature of about {1 / (1 + beta):.2f} is applied to the engine's logits: it explains "
            f"{explained:.0%} of the differences"
        )


def _growing(columns: Columns) -> Iterator[str]:
    size = np.abs(columns.difference)
    quarter = np.quantile(columns.position, [0.25, 0.75])
    first, last = size[columns.position <= quarter[0]].mean(), size[columns.position >= quarter[1]].mean()
    if last > GROWS * first:
        times = f"{last / first:.1f} times from the first quarter" if first else "from none in the first quarter"
        yield (
            f"differences grow with the position, {times} to the last: another rotary base or "
            "scaling, or a fault of the cache"
        )


def names(ids: Sequence[str | int], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with a sequence's name instead of its index."""
    return [row | {"sequence": ids[row["sequence"]]} for row in rows]
