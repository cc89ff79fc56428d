"""`tpi score --hidden`: an engine's hidden states beside the reference's, layer by layer.

The first layer that leaves rounding, in the units of compare/deviation.py: a row is a token, and the least error is
FLOOR · spacing · RMS of the reference. Its error has the shape of the number format that an engine computed in where it
is what this format does to the reference:

    e = engine - reference        f = format(reference) - reference        the shape is one if e · f >= 0.7 |e| |f|

FP8 is E4M3: by tensor with one scale, by block with a scale for each 128 features of a token.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tp_invariant_recipes.compare.deviation import FLOOR, MARGIN, SPACING, PieceError, factor_of
from tp_invariant_recipes.compare.error_shape import rms
from tp_invariant_recipes.errors import ConfigError, RunError, reason, refuse
from tp_invariant_recipes.features.score.workflow import Scoring
from tp_invariant_recipes.features.train import workflow as train
from tp_invariant_recipes.launch import local
from tp_invariant_recipes.launch.ranks import Outcome
from tp_invariant_recipes.plural import counted
from tp_invariant_recipes.runs.run_dir import RunDir

LAYERS, ROUTER = "layers.", "router."


def judge(scoring: Scoring, file: Path) -> dict[str, Any]:
    """Return a row for each layer, the verdict in words, and the exit status 1 where one is beyond. Raises a TpiError.

    file: safetensors with layers.N [tokens, h], the residual stream after decoder layer N, and router.N [tokens, topk],
    the numbers of its experts; of the first sequence, or of the one that its metadata name: {"id": …}.
    """
    from tp_invariant_recipes.features.score.head import Wanted
    from tp_invariant_recipes.features.score.hidden import Hidden, named

    engine, name = _read(file)
    if scoring.plan.layout.cp > 1:
        raise ConfigError(f"--hidden: cp={scoring.plan.layout.cp} cuts sequences; leave it out")
    train.validate(scoring.plan)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "reference.npz"
        do = Hidden(scoring.plan.config, scoring.checkpoint, scoring.file, scoring.tokenizer, out, 0, 1, Wanted(), name)
        planned = replace(scoring.plan, run_dir=RunDir(Path(scratch)))
        if local.run(planned, lambda: None, rank_fn=do) is not Outcome.COMPLETED:
            raise KeyboardInterrupt
        reference = named(out)
    problems = [problem for key, values in engine.items() for problem in _unlike(file, key, values, reference)]
    refuse(problems)
    dtype = "float32" if scoring.plan.config.mixed_precision is None else "bfloat16"
    rows = compared(engine, reference, dtype)
    status = int(any(row["beyond"] for row in rows))
    return {"exit_status": status, "text": sentence(rows, scoring.plan.config.shape.layers), "layers": rows}


def compared(engine: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], dtype: str) -> list[dict[str, Any]]:
    """Return a row for each layer that both have, in order. reference: as features/score/hidden.py writes it.

    engine: layers.N [tokens, h], router.N [tokens, topk] expert numbers. dtype: of the model's activations.
    """
    rows = []
    repetitions = sorted({name.partition("/")[0] for name in reference} - {"0"})
    for name in sorted((layer for layer in engine if layer.startswith("layers.")), key=_number):
        expected = reference[f"0/{name}"].astype(np.float64)
        noise = np.mean([np.square(reference[f"{n}/{name}"] - expected).sum(1) for n in repetitions], axis=0)
        error = PieceError(0, expected.shape[1], np.square(engine[name].astype(np.float64) - expected).sum(1), noise)
        least = FLOOR * SPACING[dtype] * rms(expected)
        factor, token = factor_of([error], least), int(error.of_rows(least).argmax())
        row: dict[str, Any] = {"layer": _number(name), "factor": factor, "beyond": not factor <= MARGIN, "token": token}
        if row["beyond"]:
            row["format"] = format_of(engine[name], reference[f"0/{name}"])
        if (router := f"router.{row['layer']}") in engine and f"0/{router}" in reference:
            row["flips"] = _flips(engine[router], reference[f"0/{router}"])
        rows.append(row)
    return rows


def sentence(rows: list[dict[str, Any]], layers: int) -> str:
    """Return the verdict in words. layers: of the model."""
    first = next((row for row in rows if row["beyond"]), None)
    flips = next((row for row in rows if row.get("flips")), None)
    compared = f"all {layers}" if len(rows) == layers else f"{len(rows)} of {layers}"
    text = f"hidden states: within rounding, {compared} layers"
    if first is not None:
        text = (
            f"hidden states: layer {first['layer']} is the first beyond rounding, {first['factor']:.3g} × what "
            f"rounding moves there, most at token {first['token']}"
        )
        if first.get("format"):
            text += f"; its error has the shape of {first['format']}"
        if before := rows.index(first):
            which = "all layers" if before == first["layer"] else f"{before} of the {first['layer']} layers"
            text += f"; {which} before it are within"
    if flips is not None:
        go = "goes" if flips["flips"] == 1 else "go"
        text += f"; {counted(flips['flips'], 'token')} {go} to other experts from layer {flips['layer']} on"
    return text


def _flips(chosen: np.ndarray, own: np.ndarray) -> int:
    """Tokens whose experts are others. chosen: [tokens, topk] numbers. own: [tokens, experts] bool."""
    routed = np.zeros(own.shape, bool)
    np.put_along_axis(routed, chosen.astype(np.int64), True, axis=1)
    return int((routed != own.astype(bool)).any(1).sum())


def _number(name: str) -> int:
    return int(name.rpartition(".")[2])


def _unlike(file: Path, key: str, values: np.ndarray, reference: dict[str, np.ndarray]) -> Iterator[str]:
    expected = reference.get(f"0/{key}")
    if expected is None:
        yield f"{file}: the model has no {key}"
    elif values.shape[:1] != expected.shape[:1] or (key.startswith(LAYERS) and values.shape != expected.shape):
        yield f"{file}: {key} has the shape {[*values.shape]}, and the reference {[*expected.shape]}"


def _read(file: Path) -> tuple[dict[str, np.ndarray], str | int | None]:
    """Return the tensors as fp32 or integers, and the id of their sequence; None: the first."""
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), "pt") as stored:
            names = [name for name in stored.keys() if name.startswith((LAYERS, ROUTER))]  # noqa: SIM118
            tensors = {name: stored.get_tensor(name) for name in names}
            metadata = stored.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise RunError(f"{file}: {reason(error)}") from error
    if not any(name.startswith(LAYERS) for name in tensors):
        raise ConfigError(f"{file} has no tensor layers.N")
    whole = {n: t.float() if t.is_floating_point() else t.to(torch.int64) for n, t in tensors.items()}
    name = metadata.get("id")
    return {n: t.numpy() for n, t in whole.items()}, int(name) if name and name.isdecimal() else name


BLOCK = 128  # features
ALIKE = 0.7
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _by_tensor(x: Tensor) -> Tensor:
    scale = x.abs().amax().clamp(min=1e-30) / _LARGEST
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def _by_block(x: Tensor) -> Tensor:
    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK)).view(len(x), -1, BLOCK)
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / _LARGEST
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).view(len(x), -1)[:, : x.shape[1]]


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "FP8 by tensor": _by_tensor,
    "FP8 by block": _by_block,
    "bf16": _bf16,
}


def format_of(engine: np.ndarray, reference: np.ndarray) -> str | None:
    """Return the format whose error the engine's is most like, [tokens, features] of a layer; None: it is like none."""
    exact = torch.from_numpy(np.ascontiguousarray(reference, np.float32))
    error = torch.from_numpy(np.ascontiguousarray(engine, np.float32)) - exact
    likeness = {name: _cosine(error, rounded(exact) - exact) for name, rounded in FORMATS.items()}
    nearest = max(likeness, key=lambda name: likeness[name])
    return nearest if likeness[nearest] >= ALIKE else None


def _cosine(a: Tensor, b: Tensor) -> float:
    size = float(a.double().norm() * b.double().norm())
    return float((a.double() * b.double()).sum()) / size if size else 0.0
