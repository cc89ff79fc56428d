# SPDX-License-Identifier: Apache-2.0
"""A step of AdamW over all parameters in one launch: it clips gradients, updates parameters and rounds them to bf16.

    g = clip g
    m = beta1 m + (1 - beta1) g
    v = beta2 v + ((1 - beta2) g) g
    p = p - lr (m / c1 / (sqrt(v / c2) + eps) + weight_decay p)

Otherwise several kernels read and write the same memory one after the other. The launch is given its arithmetic.
LIBRARY has the bits of Transformer Engine's multi_tensor_scale and multi_tensor_adam, which are compiled with
--use_fast_math: quotients and roots are the GPU's approximations, subnormal numbers are zeros, and which products and
sums are FMAs the compiler has chosen. So that arithmetic is PTX here, which no compiler changes. That of
numerics=portable is in portable/ieee/adam.py. The copy is rounded as torch rounds.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1 << 16  # elements of a row of the table
BLOCK = 1024  # elements of a program, which reads and writes 4.1 TB/s of an H200's memory with 4 warps
TABLES = 4  # cached tables

# $0 to $3: p, m, v, g of now; $4 to $7: of before; $8 to $17: the numbers of AdamNumbers, and clip.
_ARITHMETIC = tl.constexpr("""{
.reg .f32 t, u, s;
mul.rn.ftz.f32 $3, $7, $17;
mul.rn.ftz.f32 t, $3, $10;
fma.rn.ftz.f32 $1, $5, $9, t;
mul.rn.ftz.f32 t, $3, $12;
mul.rn.ftz.f32 t, t, $3;
fma.rn.ftz.f32 $2, $6, $11, t;
div.approx.ftz.f32 s, $2, $14;
sqrt.approx.ftz.f32 s, s;
add.rn.ftz.f32 s, s, $15;
div.approx.ftz.f32 u, $1, $13;
div.approx.ftz.f32 u, u, s;
fma.rn.ftz.f32 u, $4, $16, u;
neg.f32 u, u;
fma.rn.ftz.f32 $0, u, $8, $4;
}""")

Parameter = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # p, g, m, v: fp32; the copy of p: bf16; of one size


class AdamNumbers(NamedTuple):
    """The numbers of one step of a group of parameters, each already a number of fp32."""

    lr: float
    beta1: float
    rest1: float  # 1 - beta1
    beta2: float
    rest2: float
    correction1: float
    correction2: float
    eps: float
    decay: float


class Settings(NamedTuple):
    """Of a group of parameters. step: the number of the step, from 1 on."""

    step: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


class Update(NamedTuple):
    """The arithmetic of a step.

    function: a Triton function of p, g, m, v, the numbers of AdamNumbers and clip: the new p, m and v, and clipped g.
    numbers:  of a group's settings.
    """

    function: Any
    numbers: Callable[[Settings], AdamNumbers]


def _library_numbers(settings: Settings) -> AdamNumbers:
    """Return what Transformer Engine makes of a group's settings: its powers are in fp64, of betas in fp32."""
    beta1, beta2 = (np.float32(beta) for beta in settings.betas)
    one = np.float32(1)
    correction1, correction2 = (np.float32(1.0 - float(beta) ** settings.step) for beta in (beta1, beta2))
    rounded = [float(x) for x in (beta1, one - beta1, beta2, one - beta2, correction1, correction2)]
    return AdamNumbers(*[settings.lr, *rounded, settings.eps, settings.weight_decay])


@triton.jit
def _library_update(p, g, m, v, lr, b1, r1, b2, r2, c1, c2, eps, decay, clip):
    return tl.inline_asm_elementwise(
        _ARITHMETIC, "=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f,f,f,f,f,f,f",
        [p, m, v, g, lr, b1, r1, b2, r2, c1, c2, eps, decay, clip],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


LIBRARY = Update(_library_update, _library_numbers)


def clipped_adam(parameters: Sequence[Parameter], clip: float, settings: Settings, update: Update = LIBRARY) -> None:
    """One step in place, of tensors on one GPU without gaps that begin at multiples of 16 bytes, a copy at 8.

    clip: what gradients are multiplied by; at 1.0 they stay.
    """
    addresses = tuple((tensors[0].numel(), *[x.data_ptr() for x in tensors]) for tensors in parameters)
    table = _table(addresses, parameters[0][0].device)
    how = {"UPDATE": update.function, "CLIPS": clip != 1.0, "CHUNK": CHUNK, "BLOCK": BLOCK, "enable_fp_fusion": False}
    _clipped_adam[(len(table) * (CHUNK // BLOCK),)](table, *update.numbers(settings), clip, **how)


@lru_cache(maxsize=TABLES)  # training has the same memory at every step; a table depends only on its key
def _table(parameters: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Return (number of elements, addresses) of every chunk: int64 [chunks, 6] on the device."""
    rows = [
        (min(CHUNK, size - start), *[address + 4 * start for address in addresses], copy + 2 * start)
        for size, *addresses, copy in parameters
        for start in range(0, size, CHUNK)
    ]
    return torch.tensor(rows, dtype=torch.int64, device=device)


@triton.jit(do_not_specialize=[*AdamNumbers._fields, "clip"])
def _clipped_adam(
    table, lr, beta1, rest1, beta2, rest2, correction1, correction2, eps, decay, clip,
    UPDATE: tl.constexpr, CLIPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = table + 6 * (tl.program_id(0) // (CHUNK // BLOCK)).to(tl.int64)
    first = tl.program_id(0) % (CHUNK // BLOCK) * BLOCK
    count = tl.load(row).to(tl.int32)
    p = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.float32)), 16) + first
    g = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), 16) + first
    m = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.float32)), 16) + first
    v = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(tl.float32)), 16) + first
    copy = tl.multiple_of(tl.load(row + 5).to(tl.pointer_type(tl.bfloat16)), 8) + first
    numbers = (lr, beta1, rest1, beta2, rest2, correction1, correction2, eps, decay, clip)
    if first + BLOCK <= count:
        _block(p, g, m, v, copy, BLOCK, numbers, UPDATE, CLIPS, False, BLOCK)
    elif first < count:
        _block(p, g, m, v, copy, count - first, numbers, UPDATE, CLIPS, True, BLOCK)


@triton.jit
def _block(
    p, g, m, v, copy, count, numbers,
    UPDATE: tl.constexpr, CLIPS: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < count if MASKED else None
    old_p, old_g = tl.load(p + at, mask=inside), tl.load(g + at, mask=inside)
    old_m, old_v = tl.load(m + at, mask=inside), tl.load(v + at, mask=inside)
    new_p, new_m, new_v, new_g = UPDATE(old_p, old_g, old_m, old_v, *numbers)
    if CLIPS:
        tl.store(g + at, new_g, mask=inside)
    tl.store(m + at, new_m, mask=inside)
    tl.store(v + at, new_v, mask=inside)
    tl.store(p + at, new_p, mask=inside)
    tl.store(copy + at, new_p.to(tl.bfloat16), mask=inside)
