# SPDX-License-Identifier: Apache-2.0
"""Digests in a ledger: 128 bits as text, for a parameter, a group of parameters, or the whole model.

    digest of a tensor = start(dtype, shape) + sum of its elements' lanes (kernels/digest.py), two lanes of 64 bits

A digest depends only on bits, positions, dtype and shape, and not on the name, the layout or the order of addition.
"""

import functools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import xxhash

from tp_invariant_recipes.reading import Bounds, Count, Record

LANES = 2
_MASK = (1 << 64) - 1
_TEXT = re.compile(r"[0-9a-f]{32}")
_TEXTS = re.compile(r"[0-9a-f]*")
_NUMBER = re.compile(r"[0-9]+")
_EXPERT = re.compile(r"(?P<before>.*\.experts)\.(?P<number>\d+)\.(?P<after>.+)")
MANY = 4096  # tensors of experts, from which on those of one matrix of a layer have one digest together
_LAYER = re.compile(r"(?:.+\.)?layers\.\d+(?=\.)")


# Of a parameter, a module or a tensor: no space, and nothing that a terminal obeys.
Name = Annotated[str, Bounds(pattern="^[!-~]{1,1024}$")]
Shape = Annotated[tuple[Count, ...], Bounds(max_length=32, strict=False)]


@dataclass(frozen=True)
class Parameter(Record):
    """A tensor of the model, under its name in Megatron's distributed checkpoints, with layer and expert numbered.

    shape:    of the whole tensor.
    gradient: dtype of the gradient that the optimizer gets, such as "float32"; None: no gradient.
    weight:   dtype of the tensor itself.
    master:   dtype of the optimizer's master weight; None: the optimizer updates the tensor itself.
    """

    name: Name
    shape: Shape
    gradient: Name | None
    weight: Name
    master: Name | None = None

    @property
    def follows(self) -> bool:
        """Whether the tensor is its master weight rounded, which the ranks check, so that it has no digest itself."""
        return (self.master, self.weight) == ("float32", "bfloat16")


@dataclass(frozen=True)
class Traced:
    """A tensor of a traced step, over all micro-batches and ranks.

    direction: "forward" or "backward".
    module:    its name in the whole model, such as "decoder.layers.3.mlp.linear_fc1".
    tensor:    "input" or "output" of that direction: in the backward pass the input is the gradient of the module's
               output, and the output is the gradient of the module's input. Further tensors are "input.1",
               "output.1" …
    dtype, shape: of the whole tensor: [sequence, global batch, features …].
    digest:    None: this tensor has no layout-independent digest (for example, tokens of an expert).
    """

    direction: str
    module: str
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    digest: str | None

    @property
    def name(self) -> str:
        """The name in dumps and messages, such as "forward/decoder.layers.3.mlp.linear_fc1/output"."""
        return f"{self.direction}/{self.module}/{self.tensor}"


def tensor_digest(lanes: Sequence[int], dtype: str, shape: Sequence[int]) -> str:
    """Return the text of a whole tensor's digest. lanes: two sums modulo 2^64, signed or not, without the start."""
    sums = ((start + lane) & _MASK for start, lane in zip(start_lanes(dtype, tuple(shape)), lanes, strict=True))
    return digest_texts(b"".join(lane.to_bytes(8, "big") for lane in sums))[0]


def digest_texts(sums: bytes) -> list[str]:
    """Get the texts of digests, which lie one after the other in `sums`: LANES big-endian numbers of 64 bits each."""
    text, width = sums.hex(), 16 * LANES
    return [text[at : at + width] for at in range(0, len(text), width)]


@functools.lru_cache(maxsize=1 << 12)  # a model has thousands of tensors and a dozen shapes
def start_lanes(dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the initial lanes of a whole tensor's digest."""
    start = xxhash.xxh3_128_intdigest(f"{dtype}[{','.join(map(str, shape))}]".encode())
    return start >> 64, start & _MASK


def stacked_name(name: str) -> str:
    """Return the stack that an expert's tensor belongs to: "….experts.*.linear_fc2.weight"; others' own name."""
    return _EXPERT.sub(r"\g<before>.*.\g<after>", name)


def stacks(names: Sequence[str]) -> dict[str, list[int]]:
    """Name of a stack → the places in `names` of its tensors, by number of expert; of another tensor, its place."""
    places_of: dict[str, list[int]] = {}
    for at, name in enumerate(names):
        places_of.setdefault(stacked_name(name), []).append(at)
    return {name: sorted(places, key=lambda at: _numbers_by_value(names[at])) for name, places in places_of.items()}


def stack_digest(sums: bytes) -> str:
    """Return the digest of a stack. sums: of its tensors, one after the other, as for `digest_texts`."""
    return xxhash.xxh3_128_hexdigest(sums)


def stacked(parameters: Sequence["Parameter"]) -> tuple["Parameter", ...]:
    """Return the parameters with all experts as one, [experts, …]. ValueError: experts of a layer are not alike."""
    merged = []
    for name, places in stacks([parameter.name for parameter in parameters]).items():
        experts = [parameters[at] for at in places]
        if name != experts[0].name:
            if len({replace(parameter, name=name) for parameter in experts}) > 1:
                raise ValueError(f"{name}: its experts have other shapes or dtypes: ledger.experts=each")
            experts = [replace(experts[0], name=name, shape=(len(experts), *experts[0].shape))]
        merged += experts
    return tuple(merged)


def summaries(names: tuple[str, ...], texts: Sequence[str]) -> tuple[str, dict[str, str]]:
    """One digest of all named digests, independent of their order, and one per group, in the order of the groups."""
    order, groups = _summarized(names)
    lines = [f"{name} {text}\n" for name, text in zip(names, texts, strict=True)]
    whole = xxhash.xxh3_128_hexdigest("".join([lines[n] for n in order]).encode())
    return whole, {
        group: xxhash.xxh3_128_hexdigest("".join([lines[n] for n in members]).encode()) for group, members in groups
    }


@functools.lru_cache(maxsize=256)  # the same names at every step
def _summarized(names: tuple[str, ...]) -> tuple[list[int], list[tuple[str, list[int]]]]:
    order = sorted(range(len(names)), key=names.__getitem__)
    members: dict[str, list[int]] = {group_of(name): [] for name in names}
    for n in order:
        members[group_of(names[n])].append(n)
    return order, list(members.items())


@functools.cache  # the same names at every step
def group_of(name: str) -> str:
    """Return the group of a parameter: its layer ("decoder.layers.3"), or its module outside the layers."""
    layer = _LAYER.match(name)
    return layer[0] if layer else name.rpartition(".")[0] or name


def check_digests(texts: Collection[object]) -> None:
    """Check many digests in one match. ValueError names the first that is none."""
    try:
        joined = "".join(texts)  # type: ignore[arg-type]
    except TypeError:
        joined = ""
    if not (_TEXTS.fullmatch(joined) and len(joined) == 32 * len(texts) and set(map(len, texts)) <= {32}):  # type: ignore[arg-type]
        wrong = next(text for text in texts if not isinstance(text, str) or not _TEXT.fullmatch(text))
        raise ValueError(f"{wrong!r} is not a digest of 32 lower-case hexadecimal digits")


def in_order(names: Iterable[str]) -> list[str]:
    """Names of parameters in the order of a forward pass: embedding, layers by number, the rest."""
    return list(_in_order(tuple(names)))


@functools.lru_cache(maxsize=8)  # the same names for every kind of digest
def _in_order(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(names, key=_place))


# Prefixes or parts of a name, in the order within their level.
_STAGES = ("embedding.", "decoder.layers.", "decoder.", "mtp.", "output_layer.")
_PARTS = (
    "input_layernorm", "linear_qkv.layer_norm", "linear_qkv", "q_layernorm", "k_layernorm", "linear_proj",
    "mixer.in_proj.layer_norm", "mixer.in_proj", "mixer.conv1d", "mixer.dt_bias", "mixer.A_log", "mixer.D",
    "mixer.norm", "mixer.out_proj", "pre_mlp_layernorm", "linear_fc1.layer_norm", "router", "linear_fc1",
    "linear_fc2",
)  # fmt: skip


def _place(name: str) -> tuple:
    layer = _LAYER.match(name)
    stage, part = _stage_and_part(".".join(["0" if word.isdecimal() else word for word in name.split(".")]))
    return stage, int(layer[0].rpartition(".")[2]) if layer else 0, part, _numbers_by_value(name)


@functools.lru_cache(maxsize=1 << 12)  # alike for all layers and experts
def _stage_and_part(name: str) -> tuple[int, int]:
    stage = next((n for n, prefix in enumerate(_STAGES) if name.startswith(prefix)), len(_STAGES))
    return stage, next((n for n, text in enumerate(_PARTS) if text in name), len(_PARTS))


def _numbers_by_value(name: str) -> str:
    """Text that sorts as the name with its numbers by value: each as the count of its digits and the digits."""
    return _NUMBER.sub(_with_length, name)


def _with_length(number: re.Match[str]) -> str:
    digits = number[0].lstrip("0")
    return f"\0{len(digits):04}{digits}"
