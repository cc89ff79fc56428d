# SPDX-License-Identifier: Apache-2.0
"""A step of AdamW over all parameters in one launch: it clips gradients, updates parameters and rounds them to bf16.

    g = clip g
    m = beta1 m + (1 - beta1) g
    v = beta2 v + ((1 - beta2) g) g
    p = p - lr (m / c1 / (sqrt(v / c2) + eps) + weight_decay p)

Three libraries' kernels read and write the same memory one after the other: Transformer Engine's multi_tensor_scale and
multi_tensor_adam, and torch's copy. This launch has their bits. Transformer Engine compiles its kernels with
--use_fast_math: quotients and roots are the GPU's approximations, subnormal numbers are zeros, and which products and
sums are FMAs the compiler has chosen. So the arithmetic is PTX here, which no compiler changes.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1 << 16  # elements of a row of the table
BLOCK = 1024  # elements of a program, which reads and writes 4.1 TB/s of an H200's memory with 4 warps
TABLES = 4  # cached tables

# $0 to $3: p, m, v, g of now; $4 to $7: of before; $8 to $17: eps, beta1, 1 - beta1, beta2, 1 - beta2, c1, c2,
# weight_decay, clip, lr.
_ARITHMETIC = tl.constexpr("""{
.reg .f32 t, u, s;
mul.rn.ftz.f32 $3, $7, $16;
mul.rn.ftz.f32 t, $3, $10;
fma.rn.ftz.f32 $1, $5, $9, t;
mul.rn.ftz.f32 t, $3, $12;
mul.rn.ftz.f32 t, t, $3;
fma.rn.ftz.f32 $2, $6, $11, t;
div.approx.ftz.f32 s, $2, $14;
sqrt.approx.ftz.f32 s, s;
add.rn.ftz.f32 s, s, $8;
div.approx.ftz.f32 u, $1, $13;
div.approx.ftz.f32 u, u, s;
fma.rn.ftz.f32 u, $4, $15, u;
neg.f32 u, u;
fma.rn.ftz.f32 $0, u, $17, $4;
}""")

Parameter = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # p, g, m, v: fp32; the copy of p: bf16; of one size


class Settings(NamedTuple):
    """Of a group of parameters. step: the number of the step, from 1 on."""

    step: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


def clipped_adam(parameters: Sequence[Parameter], clip: float, settings: Settings) -> None:
    """One step in place, of tensors on one GPU without gaps that begin at multiples of 16 bytes, a copy at 8.

    clip: what gradients are multiplied by; at 1.0 they stay.
    """
    addresses = tuple((tensors[0].numel(), *[x.data_ptr() for x in tensors]) for tensors in parameters)
    table = _table(addresses, parameters[0][0].device)
    numbers = (settings.eps, *_numbers(settings), settings.weight_decay, clip, settings.lr)
    grid = (len(table) * (CHUNK // BLOCK),)
    _clipped_adam[grid](table, *numbers, CLIPS=clip != 1.0, CHUNK=CHUNK, BLOCK=BLOCK)


@lru_cache(maxsize=TABLES)  # training has the same memory at every step; a table depends only on its key
def _table(parameters: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Return (number of elements, addresses) of every chunk: int64 [chunks, 6] on the device."""
    rows = [
        (min(CHUNK, size - start), *[address + 4 * start for address in addresses], copy + 2 * start)
        for size, *addresses, copy in parameters
        for start in range(0, size, CHUNK)
    ]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _numbers(settings: Settings) -> tuple[float, ...]:
    """Return beta1, 1 - beta1, beta2, 1 - beta2, c1, c2, as Transformer Engine rounds them: powers are in fp64."""
    beta1, beta2 = (np.float32(beta) for beta in settings.betas)
    one = np.float32(1)
    corrections = (np.float32(1.0 - float(beta) ** settings.step) for beta in (beta1, beta2))
    return tuple(float(x) for x in (beta1, one - beta1, beta2, one - beta2, *corrections))


@triton.jit(do_not_specialize=["eps", "b1", "r1", "b2", "r2", "c1", "c2", "decay", "clip", "lr"])
def _clipped_adam(
    table, eps, b1, r1, b2, r2, c1, c2, decay, clip, lr,
    CLIPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = table + 6 * (tl.program_id(0) // (CHUNK // BLOCK)).to(tl.int64)
    first = tl.program_id(0) % (CHUNK // BLOCK) * BLOCK
    count = tl.load(row).to(tl.int32)
    p = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.float32)), 16) + first
    g = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), 16) + first
    m = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.float32)), 16) + first
    v = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(tl.float32)), 16) + first
    copy = tl.multiple_of(tl.load(row + 5).to(tl.pointer_type(tl.bfloat16)), 8) + first
    if first + BLOCK <= count:
        _block(p, g, m, v, copy, BLOCK, eps, b1, r1, b2, r2, c1, c2, decay, clip, lr, CLIPS, False, BLOCK)
    elif first < count:
        _block(p, g, m, v, copy, count - first, eps, b1, r1, b2, r2, c1, c2, decay, clip, lr, CLIPS, True, BLOCK)


@triton.jit
def _block(
    p, g, m, v, copy, count, eps, b1, r1, b2, r2, c1, c2, decay, clip, lr,
    CLIPS: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < count if MASKED else None
    old_p, old_g = tl.load(p + at, mask=inside), tl.load(g + at, mask=inside)
    old_m, old_v = tl.load(m + at, mask=inside), tl.load(v + at, mask=inside)
    new_p, new_m, new_v, new_g = tl.inline_asm_elementwise(
        _ARITHMETIC, "=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f,f,f,f,f,f,f",
        [old_p, old_m, old_v, old_g, eps, b1, r1, b2, r2, c1, c2, decay, clip, lr],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip
    if CLIPS:
        tl.store(g + at, new_g, mask=inside)
    tl.store(m + at, new_m, mask=inside)
    tl.store(v + at, new_v, mask=inside)
    tl.store(p + at, new_p, mask=inside)
    tl.store(copy + at, new_p.to(tl.bfloat16), mask=inside)
