"""`tpi score --hidden`: an engine's hidden states beside the reference's, layer by layer."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tp_invariant_recipes.compare import hidden_difference
from tp_invariant_recipes.errors import ConfigError, RunError, refuse
from tp_invariant_recipes.launch import local, train
from tp_invariant_recipes.launch.ranks import Outcome
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.workflows.score import Scoring

LAYERS, ROUTER = "layers.", "router."


def judge(scoring: Scoring, file: Path) -> dict[str, Any]:
    """A row for each layer, the verdict in words, and the exit status: 1: one is beyond rounding. Raises a TpiError.

    file: safetensors with layers.N [tokens, h], the residual stream after decoder layer N, and router.N [tokens, topk],
    the numbers of its experts; of the first sequence, or of the one that its metadata name: {"id": …}.
    """
    from tp_invariant_recipes.training.scoring.head import Wanted
    from tp_invariant_recipes.training.scoring.hidden import Hidden, named

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
    rows = hidden_difference.layers(engine, reference, dtype)
    status = int(any(row["beyond"] for row in rows))
    return {"exit_status": status, "text": hidden_difference.sentence(rows), "layers": rows}


def _unlike(file: Path, key: str, values: np.ndarray, reference: dict[str, np.ndarray]) -> Iterator[str]:
    """What is wrong with a tensor of the file."""
    right = reference.get(f"0/{key}")
    if right is None:
        yield f"{file}: the model has no {key}"
    elif values.shape[:1] != right.shape[:1] or (key.startswith(LAYERS) and values.shape != right.shape):
        yield f"{file}: {key} has the shape {[*values.shape]}, and the reference {[*right.shape]}"


def _read(file: Path) -> tuple[dict[str, np.ndarray], str | int | None]:
    """The tensors as fp32 or integers, and the id of their sequence; None: the first."""
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), "pt") as stored:
            names = [name for name in stored.keys() if name.startswith((LAYERS, ROUTER))]  # noqa: SIM118
            tensors = {name: stored.get_tensor(name) for name in names}
            metadata = stored.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise RunError(f"{file}: {error}") from error
    if not any(name.startswith(LAYERS) for name in tensors):
        raise ConfigError(f"{file} has no tensor layers.N")
    whole = {n: t.float() if t.is_floating_point() else t.to(torch.int64) for n, t in tensors.items()}
    name = metadata.get("id")
    return {n: t.numpy() for n, t in whole.items()}, int(name) if name and name.isdecimal() else name
