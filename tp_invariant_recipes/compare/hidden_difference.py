"""The first layer at which an engine's hidden states leave rounding, in the units of compare/deviation.py.

A row is a token, and the least error is FLOOR · spacing · RMS of the reference.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tp_invariant_recipes.compare.deviation import FLOOR, MARGIN, SPACING, PieceError, factor_of
from tp_invariant_recipes.compare.error_shape import rms
from tp_invariant_recipes.plural import counted


def layers(engine: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], dtype: str) -> list[dict[str, Any]]:
    """A row for each layer that both have, in order.

    engine: layers.N [tokens, h], router.N [tokens, topk] expert numbers. reference: as training/scoring/hidden.py
    writes it. dtype: of the model's activations, of which a number's spacing follows.
    """
    found = []
    repetitions = sorted({name.partition("/")[0] for name in reference} - {"0"})
    for name in sorted((one for one in engine if one.startswith("layers.")), key=_number):
        right = reference[f"0/{name}"].astype(np.float64)
        noise = np.mean([np.square(reference[f"{n}/{name}"] - right).sum(1) for n in repetitions], axis=0)
        error = PieceError(0, right.shape[1], np.square(engine[name].astype(np.float64) - right).sum(1), noise)
        least = FLOOR * SPACING[dtype] * rms(right)
        factor, token = factor_of([error], least), int(error.of_rows(least).argmax())
        row = {"layer": _number(name), "factor": factor, "beyond": not factor <= MARGIN, "token": token}
        if (router := f"router.{row['layer']}") in engine and f"0/{router}" in reference:
            row["flips"] = _flips(engine[router], reference[f"0/{router}"])
        found.append(row)
    return found


def sentence(found: list[dict[str, Any]]) -> str:
    """The verdict in words."""
    first = next((row for row in found if row["beyond"]), None)
    flips = next((row for row in found if row.get("flips")), None)
    text = f"hidden states: within rounding, all {len(found)} layers"
    if first is not None:
        text = (
            f"hidden states: layer {first['layer']} is the first beyond rounding, {first['factor']:.3g} × what "
            f"rounding moves there, most at token {first['token']}"
        )
        if first["layer"] != found[0]["layer"]:
            text += "; all layers before it are within"
    if flips is not None:
        go = "goes" if flips["flips"] == 1 else "go"
        text += f"; {counted(flips['flips'], 'token')} {go} to other experts from layer {flips['layer']} on"
    return text


def _flips(chosen: np.ndarray, own: np.ndarray) -> int:
    """Tokens whose experts are others. chosen: [tokens, topk] numbers. own: [tokens, experts] bool."""
    theirs = np.zeros(own.shape, bool)
    np.put_along_axis(theirs, chosen.astype(np.int64), True, axis=1)
    return int((theirs != own.astype(bool)).any(1).sum())


def _number(name: str) -> int:
    return int(name.rpartition(".")[2])
