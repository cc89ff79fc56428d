# SPDX-License-Identifier: Apache-2.0
"""Initial weights that depend only on the seed, the parameter's name and the element's place in the whole tensor.

    (seed, name, row, column) --Philox4x32-10--> 52 bits --> uniform in (0, 1) --AS241--> normal

They are independent of tensor, pipeline and data parallelism and of the device. The parameter's device computes them
with integers and with fp64 + - * / sqrt, which IEEE 754 defines to the last bit. Each operation is a separate torch
operation, so that no compiler can fuse two roundings into one. No log or ndtri of a library is used, since its last bit
differs between kinds of CPU.

Philox: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
AS241:  Wichura, "The percentage points of the normal distribution", Applied Statistics 37 (1988), PPND16.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.kernels.normal_quantile import (
    MOST_CENTRAL,
    MOST_NEAR,
    ROOT_HALF,
    WORD,
    bits_of,
    central,
    far,
    log_of,
    near,
    philox4x32,
)
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.replacement import resolve_own

CHUNK = 1 << 17  # elements at a time on a CPU, so that the temporaries stay in its cache
COMPILED = 1 << 22  # elements of a tensor from which on loading numba pays
CUDA_CHUNK = 1 << 24  # on a GPU, where launches and one wait per chunk then cost little: up to 2 GiB of temporaries

Segments = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class InitRule:
    """The initial values of one kind of parameters.

    name:   matches the canonical name: Megatron's, with the layer's number in the whole model.
    value:  "normal"; "ones" (of a norm), "always ones" or "zeros"; or MODULE:FUNCTION of this package, which turns
            52 random bits per element into fp64 numbers.
    dim:    for random values: the dimension that tensor parallelism splits, in the segments that Megatron notes on the
            parameter (partition_sizes) or in one.
    method: for "normal": the one of Megatron's three configured methods that gives the standard deviation.
    gated:  the rows are gate and up, each split separately, if config.gated_linear_unit.
    whole:  tensor parallelism does not split it: routers, experts, whose own tensor parallelism is 1, and projections
            that every rank holds whole.
    unmarked: it is split, and Megatron does not say so on the parameter.
    """

    name: str
    value: str
    dim: int = 0
    method: str = ""
    gated: bool = False
    whole: bool = False
    unmarked: bool = False


_AHEAD = r"mtp\.layers\.\d+\."  # a depth of MTP
LAYER = rf"(?:decoder\.layers\.\d+|{_AHEAD}mtp_model_layer(?:\.layers\.\d+)?)\."  # hybrid models have several
_NORM = (
    rf"({LAYER}(norm|input_layernorm|pre_mlp_layernorm|self_attention\.((q|k|kv)_layernorm|out_norm)|"
    r"(self_attention\.linear_proj|mlp\.linear_fc2)\.post_layernorm)|"
    rf"{_AHEAD}(enorm|hnorm|final_layernorm)|decoder\.final_(layer)?norm)\."
)
# Transformer Engine's norm + linear
_FUSED = (
    rf"{LAYER}((mixer|self_attention)\.in_proj|self_attention\.linear_(qkv|(q|kv)_up_proj)|"
    r"mlp\.linear_fc1)\.layer_norm_"
)
_MIXER = rf"{LAYER}(mixer|self_attention)\."  # Mamba-2, or a gated delta net
_LINEAR = rf"{LAYER}(self_attention\.linear_(qkv|proj)|mlp\.(experts\.\d+\.|shared_experts\.)?linear_fc[12])\."

RULES = (
    InitRule(r"embedding\.word_embeddings\.weight", "normal", 0, "embedding_init_method"),
    InitRule(r"embedding\.position_embeddings\.weight", "normal", 0, "embedding_init_method", whole=True),
    InitRule(r"output_layer\.weight", "normal", 0, "init_method"),
    # Rows are sorted by query group (q heads, k, v), so a rank's rows are consecutive in the whole tensor, too.
    InitRule(LAYER + r"self_attention\.linear_qkv\.weight", "normal", 0, "init_method"),
    InitRule(LAYER + r"self_attention\.linear_proj\.weight", "normal", 1, "output_layer_init_method"),
    InitRule(LAYER + r"self_attention\.linear_(q|q_up|kv_up)_proj\.weight", "normal", 0, "init_method"),
    InitRule(LAYER + r"self_attention\.linear_(q|kv)_down_proj\.weight", "normal", 0, "init_method", whole=True),
    InitRule(LAYER + r"self_attention\.core_attention\.softmax_offset", "normal", 0, "init_method", unmarked=True),
    InitRule(LAYER + r"mlp\.linear_fc1\.weight", "normal", 0, "init_method", gated=True),
    InitRule(LAYER + r"mlp\.linear_fc2\.weight", "normal", 1, "output_layer_init_method"),
    InitRule(LAYER + r"mlp\.shared_experts\.linear_fc1\.weight", "normal", 0, "init_method", gated=True),
    InitRule(LAYER + r"mlp\.shared_experts\.linear_fc2\.weight", "normal", 1, "output_layer_init_method"),
    InitRule(LAYER + r"mlp\.shared_experts\.gate_weight", "normal", 0, "init_method", whole=True),
    InitRule(LAYER + r"mlp\.fc1_latent_proj\.weight", "normal", 0, "init_method", whole=True),
    InitRule(LAYER + r"mlp\.fc2_latent_proj\.weight", "normal", 0, "output_layer_init_method", whole=True),
    InitRule(_AHEAD + r"eh_proj\.weight", "normal", 0, "init_method"),
    InitRule(LAYER + r"mlp\.router\.weight", "normal", 0, "init_method", whole=True),
    InitRule(LAYER + r"mlp\.router\.bias", "normal", 0, "init_method", whole=True),
    InitRule(LAYER + r"mlp\.experts\.\d+\.linear_fc1\.weight", "normal", 0, "init_method", whole=True),
    InitRule(LAYER + r"mlp\.experts\.\d+\.linear_fc2\.weight", "normal", 1, "output_layer_init_method", whole=True),
    InitRule(_MIXER + r"in_proj\.weight", "normal", 0, "init_method"),
    InitRule(_MIXER + r"out_proj\.weight", "normal", 1, "output_layer_init_method"),
    InitRule(_MIXER + r"conv1d(_weight|_bias|\.weight)", "families.mamba:conv"),
    InitRule(_MIXER + r"A_log", "families.mamba:a_log"),
    InitRule(LAYER + r"mixer\.dt_bias", "families.mamba:dt_bias"),
    InitRule(LAYER + r"(mixer\.(D|norm\.weight)|self_attention\.dt_bias)", "always ones"),
    InitRule(_NORM + "weight", "ones"),
    InitRule(_FUSED + "weight", "ones"),
    InitRule(_NORM + "bias", "zeros"),
    InitRule(_FUSED + "bias", "zeros"),
    InitRule(_LINEAR + "bias", "zeros"),
)


def megatron_std(rule: InitRule, config: Any) -> float:
    """Return the standard deviation of the normal distribution that Megatron itself would use.

    It is init_method_std, or init_method_std / sqrt(2 · num_layers) for linear_proj and linear_fc2. It is read from the
    methods that TransformerConfig derives, so that other settings (muP, embedding_init_method_std) count as well.
    """
    key = rule.method
    if rule.name.startswith("output_layer") and getattr(config, "use_mup", False):
        key = "embedding_init_method"
    method = getattr(config, key)
    if not isinstance(method, partial) or method.func is not torch.nn.init.normal_ or method.args:
        raise ConfigError(f"model.{key} is {method}; only Megatron's normal distribution is invariant, leave it unset")
    if method.keywords.get("mean", 0.0) != 0.0:
        raise ConfigError(f"model.{key} has mean {method.keywords['mean']}; only 0 is known, leave it unset")
    return method.keywords["std"]


@torch.no_grad()
def initialise(model_chunks: list[Any], *, seed: int) -> list[Any]:
    """Set every parameter of this rank's GPTModel chunks; a Megatron-Bridge pre-wrap hook.

    returns: the same chunks. Raises ConfigError with the list of parameters without a rule; then it changes none.
    """
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    plan, problems = [], []
    for chunk in model_chunks:
        # Megatron leaves weights of gated delta nets unmarked: how they are split.
        if getattr(chunk.config, families.VARIANT, None) == families.DELTA_NET:
            nets = resolve_own("numerics.megatron.families.delta_net:GatedDeltaNet")
            for net in (module for module in chunk.modules() if isinstance(module, nets)):
                resolve_own("numerics.megatron.families.delta_net:mark_sections")(net)
        for name, parameter in canonical_parameters(chunk):
            rule = rule_of(name)
            if rule is None:
                problems.append(f"{name}: no rule specifies its initial values (megatron/init.py); use numerics=stock")
            elif why := _problem(rule, parameter, size):
                problems.append(f"{name}: {why}")
            else:
                plan.append((name, parameter, rule, chunk.config))
    if problems:
        raise ConfigError("initial weights would depend on the layout:\n  " + "\n  ".join(problems))
    stds = [megatron_std(rule, config) if rule.value == "normal" else 0.0 for _, _, rule, config in plan]

    for (name, parameter, rule, config), std in zip(plan, stds, strict=True):
        if _is_drawn(rule):
            at, ranks = (0, 1) if rule.whole else (rank, size)
            shape, ranges = place(parameter.shape, rule.dim, at, ranks, segments(rule, parameter, config))
            parameter.copy_(
                sample(shape, ranges, _quantile(rule, std), seed=seed, name=name,
                      dtype=parameter.dtype, device=parameter.device)
            )  # fmt: skip
        else:
            centred = rule.value == "ones" and getattr(config, "layernorm_zero_centered_gamma", False)
            parameter.fill_(0.0 if rule.value == "zeros" or centred else 1.0)
    return model_chunks


def _problem(rule: InitRule, parameter: Tensor, size: int) -> str:
    """Return why a parameter cannot be set; "": it can. size: tensor-parallel ranks."""
    if parameter.is_meta:
        return "has no memory yet; set model.init_model_with_meta_device=false"
    split = getattr(parameter, "tensor_model_parallel", False) and getattr(parameter, "partition_dim", -1) == rule.dim
    if _is_drawn(rule) and size > 1 and not (rule.whole or rule.unmarked or split):
        return f"not split over tensor-parallel ranks along dimension {rule.dim}"
    return ""


def rule_of(name: str) -> InitRule | None:
    """Return the rule of a parameter, by its canonical name."""
    return next((rule for rule in RULES if re.fullmatch(rule.name, name)), None)


def segments(rule: InitRule, parameter: Tensor, config: Any) -> int | Sequence[int]:
    """Return what of a parameter's split dimension is split separately, as `place` takes it."""
    return getattr(parameter, "partition_sizes", 2 if rule.gated and config.gated_linear_unit else 1)


def _is_drawn(rule: InitRule) -> bool:
    return rule.value not in ("ones", "always ones", "zeros")


@dataclass(frozen=True)
class _Normal:
    """The quantile of a normal distribution, as of `sample`."""

    std: float
    mean: float = 0.0

    def __call__(self, bits: Tensor) -> Tensor:
        return _ppnd16(bits) * self.std + self.mean

    def of_cells(self, rows: Tensor, first: int, last: int, seed: int, name: str) -> Tensor:
        """Return the fp32 numbers of rows and columns first..last-1 of a tensor; on a CPU."""
        from tp_invariant_recipes.kernels.cpu import normal_cpu  # loads numba

        out = np.empty((len(rows), last - first), np.float32)
        normal_cpu.fill_normal(out, rows.numpy(), first, _key(name), seed, self.std, self.mean)
        return torch.from_numpy(out)


def _quantile(rule: InitRule, std: float) -> Callable[[Tensor], Tensor]:
    if rule.value == "normal":
        return _Normal(std)
    module, _, name = rule.value.partition(":")
    return getattr(import_module(f"tp_invariant_recipes.numerics.megatron.{module}"), name)


def canonical_parameters(chunk: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the chunk's parameters under their names in a model that is not split into pipeline stages.

    Layers get their number in the whole model. The last stage's copy of a tied embedding has the embedding's name.
    """
    for name, parameter in chunk.named_parameters():
        match = re.match(r"decoder\.layers\.(\d+)\.", name)
        if match:
            number = chunk.decoder.layers[int(match[1])].layer_number - 1
            name = f"decoder.layers.{number}.{name[match.end() :]}"
        elif name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"
        yield _expert_numbered(name, chunk.config), parameter


def _expert_numbered(name: str, config: Any) -> str:
    """Return an expert's name with its number in the whole layer, the same for all classes that hold its weight."""
    from megatron.core import parallel_state

    # One module for each expert, or one module with numbered weights for all experts.
    match = re.fullmatch(
        rf"({LAYER}mlp\.experts\.)(?:local_experts\.(\d+)\.(.+)|(linear_fc\d\.)(?:to_wrap\.)?([a-z]+)(\d+))", name
    )
    if not match:
        return name
    local = config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    number = parallel_state.get_expert_model_parallel_rank() * local + int(match[2] or match[6])
    return f"{match[1]}{number}.{match[3] or match[4] + match[5]}"


def place(
    local: Sequence[int], dim: int, rank: int, size: int, segments: int | Sequence[int] = 1
) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Return the whole shape, and the ranges in it of the tensor of shape `local` on rank `rank` of `size`.

    segments: the number of equal parts of the split dimension, each split separately, or the sizes of the local parts.
              With two, gate and up, and size 2:

        whole  [ gate 0 | gate 1 | up 0 | up 1 ]        rank 1  [ gate 1 | up 1 ]
    """
    shape = [n * size if d == dim else n for d, n in enumerate(local)]
    ranges = [[(0, n)] for n in shape]
    steps = segment_rows(local[dim], segments)
    starts = [size * sum(steps[:n]) + rank * step for n, step in enumerate(steps)]
    ranges[dim] = [(start, start + step) for start, step in zip(starts, steps, strict=True)]
    return shape, ranges


def segment_rows(rows: int, segments: int | Sequence[int]) -> list[int]:
    """Return the rows of each segment on a rank that has so many together. ValueError: they are not these segments."""
    steps = [rows // segments] * segments if isinstance(segments, int) else list(segments)
    if sum(steps) != rows:
        what = f"{segments} equal segments" if isinstance(segments, int) else f"segments of {steps}"
        raise ValueError(f"{rows} rows are not {what}")
    return steps


def sample(
    shape_global: Sequence[int],
    index_ranges: Sequence[Segments],
    quantile: Callable[[Tensor], Tensor],
    *,
    seed: int,
    name: str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return a part of the random tensor `name`; the same bits as in the whole tensor and on any device.

    shape_global: shape of the whole tensor. The sizes of its first and last dimension do not change the values.
    index_ranges: per dimension the (start, stop) ranges of the part, in the part's order.
    quantile:     52 random bits in int64 -> fp64, element by element.
    returns: rounded to fp32, then to `dtype`.
    """
    _refuse_bad_part(shape_global, index_ranges, seed, name)
    sizes = [sum(stop - start for start, stop in segments) for segments in index_ranges]
    device = torch.device(device)
    compiled = isinstance(quantile, _Normal) and device.type == "cpu" and math.prod(sizes) > COMPILED
    chunk = CUDA_CHUNK if device.type == "cuda" or compiled else CHUNK
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for size, segments in zip(shape_global[:-1], index_ranges[:-1], strict=True):
        indices = torch.cat([torch.arange(start, stop, device=device) for start, stop in segments])
        rows = (rows[:, None] * size + indices).reshape(-1)
    out = torch.empty(len(rows), sizes[-1], dtype=dtype, device=device)
    at = 0
    for start, stop in index_ranges[-1]:
        for first in range(start, stop, chunk):
            last = min(first + chunk, stop)
            step = max(1, chunk // (last - first))
            for row in range(0, len(rows), step):
                part = rows[row : row + step]
                if compiled:
                    values = quantile.of_cells(part, first, last, seed, name)  # type: ignore[attr-defined]
                else:
                    values = quantile(_bits(part, first, last, seed=seed, name=name)).to(torch.float32)
                out[row : row + step, at : at + last - first] = values.to(dtype)
            at += last - first
    return out.view(sizes)


def _refuse_bad_part(shape_global: Sequence[int], index_ranges: Sequence[Segments], seed: int, name: str) -> None:
    """Raise ValueError for a seed, a shape or ranges that `sample` cannot number."""
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"the seed must fit 64 bits without a sign, not {seed}")
    if len(shape_global) != len(index_ranges) or not shape_global:
        raise ValueError(f"{len(index_ranges)} lists of ranges for the {len(shape_global)} dimensions of {name}")
    for size, segments in zip(shape_global, index_ranges, strict=True):
        if any(not 0 <= start <= stop <= size for start, stop in segments):
            raise ValueError(f"{name}: ranges {list(segments)} are not within 0..{size}")
    if math.prod(shape_global[:-1]) > WORD or shape_global[-1] > WORD:
        raise ValueError(f"{name}: {tuple(shape_global)} is too large to number")


def _bits(rows: Tensor, first: int, last: int, *, seed: int, name: str) -> Tensor:
    """52 random bits for every element of `rows` and columns first..last-1.

    The key is 64 bits of the name's SHA-256. The counter is (column // 2, row, seed): one call gives 128 bits for two
    neighbouring columns, the even one first.
    """
    key = _key(name)
    pairs = torch.arange(first // 2, (last + 1) // 2, device=rows.device)
    counter = (pairs[None, :], rows[:, None], _word(seed, rows.device), _word(seed >> 32, rows.device))
    words = philox4x32(counter, (key & WORD, key >> 32))
    bits = torch.stack((bits_of(*words[:2]), bits_of(*words[2:])), dim=-1)
    return bits.flatten(1)[:, first % 2 : first % 2 + last - first]


def _key(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def _word(number: int, device: torch.device) -> Tensor:
    return torch.full((1, 1), number & WORD, dtype=torch.int64, device=device)  # filled on the device, without a copy


def _ppnd16(bits: Tensor) -> Tensor:
    """Return the normal quantile of u = (2 · bits + 1) / 2^53, in fp64: never 0, never 1, and symmetric."""
    odd = 2 * bits + 1
    q = (odd - (1 << 52)).to(torch.float64) * 2.0**-53  # u - 1/2, exactly
    tail = (torch.minimum(odd, (1 << 53) - odd)).to(torch.float64) * 2.0**-53  # the smaller of u and 1 - u
    outer = (q.abs() > MOST_CENTRAL).flatten().nonzero().squeeze(1)
    # A root that is rounded correctly: on a CPU torch's is Intel's vector library, which misrounds one number in 70.
    x = -_log(tail.flatten()[outer])
    r = torch.sqrt(x) if x.is_cuda else torch.from_numpy(np.sqrt(x.numpy()))
    distance = near(r)
    beyond = (r > MOST_NEAR).nonzero().squeeze(1)  # one in 10^10 or so
    distance[beyond] = far(r[beyond])
    return central(q).flatten().index_copy_(0, outer, torch.copysign(distance, q.flatten()[outer])).view(bits.shape)


def _log(x: Tensor) -> Tensor:
    m, e = torch.frexp(x)
    small = m < ROOT_HALF
    return log_of(torch.where(small, m * 2, m), e.to(torch.float64) - small.to(torch.float64))
