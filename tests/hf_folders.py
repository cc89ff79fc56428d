# SPDX-License-Identifier: Apache-2.0
"""Hugging Face checkpoints of toy models, written by hand: config.json, and tensors of random values."""

import functools
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.sources import hf_families, hf_models

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]  # name -> type in a safetensors header, shape, bytes


def model_section(model: str, *overrides: str) -> dict[str, Any]:
    """The section `model` of a run on a CPU."""
    return compose(model, [*overrides, "numerics=stock"], device="cpu").config.model


def tensors(model: Mapping[str, Any], seed: int = 0, dtype: str = "BF16") -> Tensors:
    """Values of about 0.02, other ones for each name and seed, all of whose bits are random."""
    family = hf_models.family_of(model)
    assert isinstance(family, hf_models.Family), family
    return dict(_values(tuple(family.tensors(family.sizes(model))), seed, dtype))


@functools.lru_cache(8)
def _values(shapes: tuple[tuple[str, tuple[int, ...]], ...], seed: int, dtype: str) -> Tensors:
    results = {}
    for name, shape in shapes:
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        values = rng.normal(1.0 if name.endswith("norm.weight") else 0.0, 0.02, shape).astype(np.float32)
        bits = values.view(np.uint32)
        own = "F32" if name.endswith(hf_families.BIAS) else dtype
        results[name] = (own, shape, bits.tobytes() if own == "F32" else (bits >> 16).astype(np.uint16).tobytes())
    return results


def file(tensors: Tensors) -> bytes:
    """The bytes of a safetensors file."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(data for *_, data in tensors.values())


def make(
    folder: Path,
    model: Mapping[str, Any],
    *,
    seed: int = 0,
    dtype: str = "BF16",
    files: int = 1,
    change: Callable[[dict[str, Any], Tensors], None] | None = None,
) -> Path:
    """Write a folder. files: more than one have an index. change: what is to be wrong, with config.json and tensors."""
    family = hf_models.family_of(model)
    assert isinstance(family, hf_models.Family), family
    config = hf_models.config_of(family, model, {"BF16": "bfloat16", "F32": "float32"}[dtype])
    all_ = tensors(model, seed, dtype)
    if change:
        change(config, all_)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = (
        ["model.safetensors"] if files == 1 else [f"model-{n + 1:05}-of-{files:05}.safetensors" for n in range(files)]
    )
    parts = [dict(list(all_.items())[n::files]) for n in range(files)]
    for name, part in zip(names, parts, strict=True):
        (folder / name).write_bytes(file(part))
    if files > 1:
        where = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder
