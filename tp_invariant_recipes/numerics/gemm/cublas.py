# SPDX-License-Identifier: Apache-2.0
"""cuBLAS's GEMMs, and an exactness check that tells whether one has the bits of a definition on the GPU at hand.

cuBLAS chooses an algorithm by shapes, strides, dtypes, alignment and torch's settings; `kind` holds all of these. The
exactness check's operands cancel (numerics/gemm/probe.py): on others an output in bf16 hides most differences.
TPI_CHECK_PRODUCTS=1 repeats the comparison on the operands of the run, of attention too (numerics/layers/attention.py).
"""

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tp_invariant_recipes
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.machine.versions import PACKAGES, installed
from tp_invariant_recipes.numerics.gemm.operands import like, same_bits
from tp_invariant_recipes.numerics.gemm.probe import cancelling, residue
from tp_invariant_recipes.start import cache as start_cache
from tp_invariant_recipes.start.forking import DRIVER

CHECK = "TPI_CHECK_PRODUCTS"  # 1: compute what a trial has decided both ways, on the operands of the run, and compare
TRIALS = 2  # of operands that cancel; one shows every other order of additions that was tried
# What cuBLAS says of strides or alignment that it does not take. Any other error of an exactness check is an error of
# the run.
LAYOUT_NOT_TAKEN = ("CUBLAS_STATUS_NOT_SUPPORTED", "CUBLAS_STATUS_INVALID_VALUE")

FOLDER, MOST = "exact", 64  # of the user's cache, and how many files it holds: one for each GPU and its software
OF_GEMMS = ("CUBLAS", "CUDNN", "NVTE_", "NVIDIA_", "TRITON", "TORCH_BLAS", "CUDA_DEVICE_MAX")  # in names of variables

# a, b, out, add: out = a @ b, or out += a @ b, with fp32 accumulation, rounded once to out's dtype.
# FP8 operands are `Quantized`.
Product = Callable[[Any, Any, Tensor, bool], object]


def launch(a: Tensor, b: Tensor, out: Tensor, add: bool) -> Tensor:
    """out = a @ b, or out += a @ b, in one launch."""
    if out.dtype == a.dtype:
        return torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    return torch.addmm(out, a, b, out.dtype, out=out) if add else torch.mm(a, b, out.dtype, out=out)


def launch_batch(a: Tensor, b: Tensor, out: Tensor, add: bool) -> Tensor:
    """out[v] = a[v] @ b[v], or out[v] += a[v] @ b[v], in one launch; out is fp32."""
    if out.dtype == a.dtype:
        return torch.baddbmm(out, a, b, out=out) if add else torch.bmm(a, b, out=out)
    return torch.baddbmm(out, a, b, out.dtype, out=out) if add else torch.bmm(a, b, out.dtype, out=out)


def kind(a: Tensor, b: Tensor, out: Tensor, add: bool) -> tuple[Any, ...]:
    """All that decides which kernel cuBLAS runs for a @ b in memory that lies as `out` does."""
    return (
        a.shape, b.shape[1], a.stride(), b.stride(), out.stride(), a.dtype, out.dtype, add,
        a.data_ptr() % 16, b.data_ptr() % 16, out.data_ptr() % 16, *settings(),
    )  # fmt: skip


def capturing(operand: Tensor) -> bool:
    """Whether what is launched on this operand goes into a CUDA graph, so that nothing may wait for the GPU."""
    return operand.is_cuda and torch.cuda.is_current_stream_capturing()


class Verdicts(dict[tuple[Any, ...], bool]):
    """What exactness checks have found, by kind: a process finds it again on the same GPU with the same software.

    name: of the checks.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


def tried(
    decided: dict[tuple[Any, ...], bool], kind: tuple[Any, ...], operand: Tensor, trial: Callable[[], bool]
) -> bool:
    """Return what an exactness check of this kind has found, once a process; of `Verdicts`, once a GPU.

    While a CUDA graph is captured nothing is tried: False.
    """
    exact = decided.get(kind)  # looked up once: kinds are compared number by number
    if exact is None:
        if capturing(operand):
            return False
        keeps = isinstance(decided, Verdicts) and operand.is_cuda
        file, kept = _kept(operand.get_device()) if keeps else ("", {})
        key = f"{getattr(decided, 'name', '')} {kind}"
        exact = kept.get(key)
        if exact is None:
            _running.append(kind)
            try:
                kept[key] = exact = trial()
            finally:
                _running.pop()
            if file:
                start_cache.keep(file, kept)
        decided[kind] = exact
    return exact


@cache
def _kept(device: int) -> tuple[str, dict[str, bool]]:
    """Return the name of the file of a GPU, and what it holds; "": nothing tells the driver's version."""
    try:
        digest = hashlib.sha256(repr(_state(device)).encode())
    except OSError:
        return "", {}
    file = f"{FOLDER}/{digest.hexdigest()}"
    with suppress(OSError, ValueError):
        return file, {str(kind): bool(exact) for kind, exact in dict(start_cache.find(file)).items()}
    start_cache.prune(FOLDER, MOST)
    return file, {}


def _state(device: int) -> tuple[Any, ...]:
    """Return what decides the bits of a GPU's GEMMs beside their kind: the GPU, libraries, variables, our sources."""
    ours = Path(tp_invariant_recipes.__file__).parent
    sources = [source for package in ("kernels", "numerics") for source in (ours / package).rglob("*.py")]
    return (
        str(torch.cuda.get_device_properties(device).uuid), DRIVER.read_bytes(), [*map(installed, PACKAGES.values())],
        sorted(item for item in os.environ.items() if any(word in item[0] for word in OF_GEMMS)),
        start_cache.stamp([*sources, *(Path(folder) for folder in sys.path if folder.endswith("-packages"))]),
    )  # fmt: skip


_running: list[tuple[Any, ...]] = []  # the kinds that are tried, one within another


def trying() -> bool:
    """Whether an exactness check runs. It calls modules, whose hooks must leave what they return as it is."""
    return bool(_running)


@cache
def checking() -> bool:
    """Whether every GEMM and every attention of this process is computed both ways."""
    return os.environ.get(CHECK, "0") == "1"


def settings() -> tuple[Any, ...]:
    """torch's settings that decide which kernel cuBLAS runs. These getters take 0.6 µs together, the public ones 3.

    The precision of fp32 holds whatever has set it: `fp32_precision` of the GEMM, of CUDA or of all backends, or the
    older `allow_tf32` and `set_float32_matmul_precision`, whose own getters raise once `fp32_precision` was set.
    """
    return (
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_fp32_precision_getter("cuda", "matmul"),
        # Of the enum itself, a comparison takes longer than the rest of a lookup.
        int(torch._C._get_blas_preferred_backend()),  # type: ignore[call-overload]
    )


def agree(
    first: Product,
    defined: Product,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    add: bool,
    parts: Sequence[slice] = (slice(None),),
) -> bool:
    """Whether two GEMMs have the same bits on operands that cancel and lie in memory as these do; `out` stays.

    parts: of the summed dimension, each a sum that cancels.
    False, too, where cuBLAS does not take the operands' layout.
    """

    def draw(x: Tensor, y: Tensor, generator: torch.Generator) -> None:
        for part in parts:
            cancelling(x[:, part], y[part], generator)

    return agree_on(first, defined, like(a, 16), like(b, 16), out, add, [draw] * TRIALS, LAYOUT_NOT_TAKEN)


def agree_on(
    first: Product,
    defined: Product,
    a: Any,
    b: Any,
    out: Tensor,
    add: bool,
    draws: Sequence[Callable[[Any, Any, torch.Generator], None]],
    not_taken: Sequence[str],
) -> bool:
    """Whether two GEMMs have the same bits on all draws; False, too, where the first does not take the operands.

    a, b:      memory, which each draw fills. out: what the GEMMs' outputs lie like; it stays.
    not_taken: words of errors that say so.
    """
    generator = torch.Generator(out.device).manual_seed(0)
    out_first, other = like(out, 16), like(out, 16)
    for draw in draws:
        draw(a, b, generator)
        residue(out_first, generator)
        other.copy_(out_first)
        try:
            first(a, b, out_first, add)
        except RuntimeError as error:
            if not any(words in str(error) for words in not_taken):
                raise
            return False
        defined(a, b, other, add)
        if not same_bits(out_first, other):
            return False
    return True


def compute(first: Product, defined: Product, a: Any, b: Any, out: Tensor, add: bool, what: str) -> Tensor:
    """Have `first` fill `out`, of which an exactness check has found that it has the bits of `defined`.

    what:    what has computed which GEMM, in words.
    returns: out.
    raises RunError: TPI_CHECK_PRODUCTS=1, and on these operands their bits differ.
    """
    if not checking():
        first(a, b, out, add)
        return out
    expected = like(out, 16)
    if add:
        expected.copy_(out)
    defined(a, b, expected, add)
    first(a, b, out, add)
    if not same_bits(out, expected):
        raise RunError(
            f"{CHECK}=1: {what} of {[*a.data.shape]} and {[*b.data.shape]} is not bitwise identical to the fixed-tile "
            f"GEMM ({a.data.dtype} to {out.dtype}, add={add}): the runtime exactness check did not detect it"
        )
    return out
