# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face checkpoint on disk: what its files say of themselves, without the tensors' values.

FOLDER/config.json                     the model
FOLDER/*.safetensors                   the tensors
FOLDER/model.safetensors.index.json    optional: which file has which tensor
"""

import functools
import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tp_invariant_recipes.errors import ConfigError, listed, reason
from tp_invariant_recipes.reading import MIB, open_file, parse_json, parse_object, read_limited
from tp_invariant_recipes.sources.hf_families import FAMILIES
from tp_invariant_recipes.start import lazy_imports
from tp_invariant_recipes.text import abbreviated

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
LARGEST_CONFIG, LARGEST_HEADER = MIB, 64 * MIB  # bytes; a header has about 100 for each tensor
SHOWN = 5  # problems of one kind that one message names

# Name in a safetensors header -> bytes of an element. Others are quantised or no weights.
DTYPES = {"BF16": 2, "F16": 2, "F32": 4}
# Those with values that bf16 has not.
WIDER_THAN_BF16 = {"F16", "F32"}


@dataclass(frozen=True)
class Stored:
    """A tensor of the folder. start: byte of the file. size: bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose files agree with each other. config: what config.json holds. tensors: by their names."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Stored]

    def digest(self) -> str:
        """SHA-256, hex, over names, types, shapes and bits of all tensors, in the order of their names.

        It does not depend on how they are spread over files. All are read.
        """
        states = [(file, file.stat()) for file in sorted({tensor.file for tensor in self.tensors.values()})]
        return _digest(self.folder, tuple((str(file), state.st_size, state.st_mtime_ns) for file, state in states))

    def bits(self, name: str) -> str:
        """SHA-256, hex, of a tensor's bytes."""
        return _bits(self.tensors[name])


def read(folder: Path) -> Checkpoint:
    """Read config.json and the headers of all tensors. Raises ConfigError listing every problem."""
    where = f"weights={folder}"
    if not folder.is_dir():
        raise ConfigError(f"{where}: {'that is a file; name its folder' if folder.exists() else 'no such folder'}")
    problems: list[str] = []
    config = _config(folder, problems)
    tensors: dict[str, Stored] = {}
    for file in _files(folder, problems):
        for name, tensor in _header(file, problems).items():
            if name in tensors:
                problems.append(f"{name} is in {tensors[name].file.name} and in {file.name}")
            tensors[name] = tensor
    if not problems:
        problems += _indexed(folder, tensors)
    if problems:
        problems = [f"{where}: {problem}" for problem in problems]
        raise ConfigError(listed(problems), problems)
    return Checkpoint(folder, config, tensors)


def _config(folder: Path, problems: list[str]) -> dict[str, Any]:
    file = folder / CONFIG
    if not file.is_file():
        problems.append(f"there is no {CONFIG}, which names the model")
        return {}
    try:
        config = parse_json(read_limited(file, LARGEST_CONFIG))
        if isinstance(config, dict):
            return config
        problems.append(f"{CONFIG} holds no fields")
    except (OSError, ValueError) as error:
        problems.append(f"{CONFIG} cannot be read: {reason(error)}")
    return {}


def _index(folder: Path) -> dict[str, str] | None:
    """Tensor -> name of its file; None: there is no index. Raises OSError, ValueError."""
    if not (folder / INDEX).exists():
        return None
    index = parse_json(read_limited(folder / INDEX, LARGEST_HEADER))
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ValueError("its weight_map does not say which file has which tensor")
    if away := next((name for name in files.values() if os.path.basename(name) != name or name in ("", "..")), None):
        raise ValueError(f"it names {away!r}, which is no file of this folder")
    return files


def _files(folder: Path, problems: list[str]) -> list[Path]:
    """Return the files with the tensors: those of the index, or all."""
    try:
        index = _index(folder)
    except (OSError, ValueError) as error:
        problems.append(f"{INDEX}: {reason(error)}")
        return []
    if index is None:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            bins = any(folder.glob("pytorch_model*.bin"))
            problems.append("there are no *.safetensors" + ("; convert pytorch_model*.bin" if bins else ""))
        return files
    names = sorted(set(index.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        problems.append(f"{INDEX} names {abbreviated(missing, SHOWN)}, and there is no such file")
    return [folder / name for name in names if name not in missing]


def _indexed(folder: Path, tensors: dict[str, Stored]) -> list[str]:
    """Where the index and the files disagree."""
    index = _index(folder)
    if index is None:
        return []
    wrong = [n for n in sorted({*index, *tensors}) if n not in tensors or tensors[n].file.name != index.get(n)]
    return [f"{INDEX} and the files disagree on where {abbreviated(wrong, SHOWN)} is"] if wrong else []


def _header(file: Path, problems: list[str]) -> dict[str, Stored]:
    """Return the tensors of a file by name. What is wrong is added to `problems`."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Stored] = {}
    try:
        with open_file(file) as stream:
            at = 8 + int.from_bytes(stream.read(8), "little")
        with safe_open(file, "np") as opened:
            for name in opened.offset_keys():
                part = opened.get_slice(name)
                dtype, shape = part.get_dtype(), tuple(part.get_shape())
                if dtype not in DTYPES:
                    raise ValueError(f"{name} is {dtype}, and tpi takes {', '.join(DTYPES)}")
                tensors[name] = Stored(file, dtype, shape, at, DTYPES[dtype] * math.prod(shape))
                at += tensors[name].size
    except SafetensorError as error:
        problems.append(f"{file.name}: it is damaged, truncated or no safetensors file: {error}")
    except (OSError, ValueError) as error:
        problems.append(f"{file.name}: {reason(error)}")
    return tensors


@functools.cache
def _digest(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> str:
    """stamps: of the files, so that one that is written again is read again."""
    tensors = read(folder).tensors
    lines = ([name, tensor.dtype, list(tensor.shape), _bits(tensor)] for name, tensor in sorted(tensors.items()))
    whole = hashlib.sha256()
    for line in lines:
        whole.update(f"{json.dumps(line)}\n".encode())
    return whole.hexdigest()


def _bits(tensor: Stored) -> str:
    state = hashlib.sha256()
    for block in _blocks(tensor):
        state.update(block)
    return state.hexdigest()


def _blocks(tensor: Stored) -> Iterator[bytes]:
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        remaining = tensor.size
        while remaining and (block := stream.read(min(remaining, 16 * MIB))):
            remaining -= len(block)
            yield block
    if remaining:
        raise ConfigError(f"{tensor.file} has become shorter since it was looked at")


MODELS = "megatron.bridge.models"
# `model_type` in config.json -> Bridge's package that registers its conversion.
PACKAGES = {family.model_type: family.package for family in FAMILIES}


def from_folder(folder: Path) -> Any:
    """Return the AutoBridge of a folder with a config.json; it reads weights when they are asked for.

    Only files of the folder are read, and none of its code is run.
    """
    return _class(folder).from_hf_pretrained(str(folder), local_files_only=True)


def from_config(folder: Path) -> Any:
    """Return the AutoBridge of a folder that has a config.json alone, for weights that are to be written."""
    bridge = _class(folder)
    from transformers import AutoConfig

    return bridge.from_hf_config(AutoConfig.from_pretrained(str(folder), local_files_only=True))


def unused(folder: Path) -> tuple[str, ...]:
    """Return beginnings of modules of Bridge that weights of a folder's model do not need: training, other families."""
    others = {*PACKAGES.values()} - {PACKAGES[_model_type(folder)]}
    return ("megatron.bridge.training.", *(f"{MODELS}.{package}." for package in sorted(others)))


def _model_type(folder: Path) -> str:
    return str(parse_object(read_limited(folder / CONFIG, LARGEST_CONFIG))["model_type"])


def _class(folder: Path) -> Any:
    """Bridge is loaded (start/bridge.py). Of its families, only the folder's is imported: all take 2 s more."""
    with lazy_imports.in_parts("megatron.bridge"):
        import_module(f"{MODELS}.{PACKAGES[_model_type(folder)]}")
        from megatron.bridge.models.conversion.auto_bridge import AutoBridge
        from megatron.bridge.models.conversion.param_mapping import AutoMapping

    # A local layer of numerics/megatron/families/layers.py, whose name would pass for a norm's.
    AutoMapping.register_module_type("RowParallelLinearLayerNorm", "row")
    return AutoBridge
