# SPDX-License-Identifier: Apache-2.0
"""The trial that decides whether a library's product may stand for the defined one: it sees a library that lies.

It runs on a CPU here, with libraries made for it; tests/gpu/kernels/test_products_gpu.py asks cuBLAS.
"""

import pytest
import torch

from tests.operands import same_bits
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.kernels.gemm.fixed_tile_gemm import fixed_tile_gemm
from tp_invariant_recipes.numerics.gemm import cublas as cublas_product
from tp_invariant_recipes.numerics.gemm import defined
from tp_invariant_recipes.numerics.gemm.probe import cancelling

DTYPES = (torch.bfloat16, torch.float32)
SHAPES = ((128, 16, 128), (64, 4096, 64), (33, 17, 40), (2, 8, 2048))  # m, k, n


def in_order(a, b, out, add=False):
    """What the libraries below claim to be: on a CPU fixed tiles add fp32 products over k in order and round once."""
    return fixed_tile_gemm(a, b, out, add=add)


def split_in_half(a, b, out, add=False):
    half = a.shape[1] // 2
    first, second = torch.empty(out.shape), torch.empty(out.shape)
    in_order(a[:, :half], b[:half], first)
    in_order(a[:, half:], b[half:], second)
    return out.copy_(first + second + out.float() if add else first + second)


def backwards(a, b, out, add=False):
    return in_order(a.flip(1), b.flip(0), out, add)


def rounded_in_between(a, b, out, add=False):
    """A split whose halves are rounded to bf16, as allow_bf16_reduced_precision_reduction lets cuBLAS do."""
    half = a.shape[1] // 2
    first, second = torch.empty(out.shape), torch.empty(out.shape)
    in_order(a[:, :half], b[:half], first)
    in_order(a[:, half:], b[half:], second)
    total = first.bfloat16().float() + second.bfloat16().float()
    return out.copy_(total + out.float() if add else total)


def refuses(a, b, out, add=False):
    raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx(…)`")


def lies_about_large_numbers(a, b, out, add=False):
    """And not about those of the trial."""
    return (split_in_half if a.abs().max() > 100 else in_order)(a, b, out, add)


@pytest.fixture
def library(monkeypatch):
    """Have products on a CPU chosen as on a GPU, with the function given for cuBLAS. returns: the ways, as they run."""

    def use(cublas):
        ran = []

        def noting(way, compute):
            def run(*operands):
                ran.append(way)
                return compute(*operands)

            return run

        monkeypatch.setattr(cublas_product, "launch", noting("cuBLAS", cublas))
        monkeypatch.setattr(defined, "by_fixed_tile_gemm", noting("fixed tiles", defined.by_fixed_tile_gemm))
        monkeypatch.setattr(defined, "_cublas_is_exact", {})
        monkeypatch.setattr(defined, "chosen", defined._on_gpu)
        return ran

    return use


def empty_operands(shape, dtype, out_dtype=None):
    m, k, n = shape
    return torch.empty(m, k, dtype=dtype), torch.empty(k, n, dtype=dtype), torch.empty(m, n, dtype=out_dtype or dtype)


def cancelling_operands(shape, dtype, out_dtype=None):
    """Numbers of a run, where there is something to add to."""
    a, b, out = empty_operands(shape, dtype, out_dtype)
    cancelling(a, b, torch.Generator().manual_seed(1))
    return a, b, out.fill_(2.0**-12)


def accepted(shape, dtype, *, add=False, out_dtype=None) -> bool:
    return defined._matches_definition(*empty_operands(shape, dtype, out_dtype), add)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_honest_library_is_taken(library, shape, dtype):
    library(in_order)
    assert accepted(shape, dtype)
    assert accepted(shape, dtype, out_dtype=torch.float32)


@pytest.mark.parametrize("lie", (split_in_half, backwards, rounded_in_between), ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_library_that_lies_is_not(library, shape, dtype, lie):
    library(lie)
    assert not accepted(shape, dtype)
    assert not accepted(shape, dtype, out_dtype=torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_lie_about_adding_in_place_is_seen(library, dtype):
    """Adds each product to the output as it comes, where the definition adds the whole sum once."""

    def into_the_output(a, b, out, add):
        total = out.float() if add else torch.zeros(out.shape)
        for x, y in zip(a.float().t(), b.float(), strict=True):
            total += x[:, None] * y[None, :]
        return out.copy_(total)

    library(into_the_output)
    assert accepted((128, 16, 128), dtype)
    assert not accepted((128, 16, 128), dtype, add=True, out_dtype=torch.float32)


# What cuBLAS is -> what computes a product when nothing was tried, and when a trial decided before a capture.
DECISIONS = (
    (in_order, "cuBLAS"),
    (lies_about_large_numbers, "cuBLAS"),
    (split_in_half, "fixed tiles"),
    (refuses, "fixed tiles"),
)


@pytest.mark.parametrize("add", (False, True))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cublas, way", DECISIONS, ids=lambda value: getattr(value, "__name__", value))
def test_what_computes_a_product(library, monkeypatch, cublas, way, dtype, add):
    ran = library(cublas)
    a, b, out = cancelling_operands((33, 64, 40), dtype, torch.float32)
    expected = in_order(a, b, out.clone(), add)
    capturing = True
    monkeypatch.setattr(cublas_product, "capturing", lambda operand: capturing)
    assert same_bits(defined.compute(a, b, out.clone(), add), expected)
    assert ran == ["fixed tiles"]  # a capture waits for no trial
    assert defined._cublas_is_exact == {}
    capturing = False
    assert same_bits(defined.compute(a, b, out.clone(), add), expected)
    assert ran[-1] == way
    assert list(defined._cublas_is_exact.values()) == [way == "cuBLAS"]
    capturing = True
    assert same_bits(defined.compute(a, b, out.clone(), add), expected)
    assert ran[-1] == way


@pytest.mark.parametrize("dtype", (torch.float16, torch.float64), ids=str)
def test_other_dtypes_are_refused(library, dtype):
    library(in_order)
    with pytest.raises(TypeError, match="both must be bf16, or both fp32"):
        defined.compute(*cancelling_operands((8, 8, 8), dtype), False)


@pytest.mark.parametrize(
    "error", (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("an illegal memory access"))
)
def test_an_error_that_is_none_of_a_layout_is_one(library, error):
    def fails(a, b, out, add):
        raise error

    library(fails)
    with pytest.raises(RuntimeError) as raised:
        accepted((8, 8, 8), torch.bfloat16)
    assert raised.value is error


def _with_strides(matrix):
    return matrix.new_empty(matrix.shape[0], matrix.shape[1] + 8)[:, : matrix.shape[1]]


def _off_16_bytes(matrix):
    return matrix.new_empty(matrix.numel() + 1)[1:].view(matrix.shape)


@pytest.mark.parametrize("layout", (_with_strides, _off_16_bytes), ids=("strides", "alignment"))
@pytest.mark.parametrize("number", range(3), ids=("a", "b", "out"))
def test_each_layout_is_tried_by_itself(library, layout, number):
    """cuBLAS chooses a kernel by all of it: this library lies about one layout of one matrix."""

    def place(matrix):
        return matrix.stride(), matrix.data_ptr() % 16

    plain = empty_operands((64, 256, 64), torch.bfloat16)
    other = [layout(matrix) if n == number else matrix for n, matrix in enumerate(plain)]
    lied_about = place(other[number])

    def lies(*operands):
        return (split_in_half if place(operands[number]) == lied_about else in_order)(*operands)

    library(lies)
    assert defined._matches_definition(*plain, False)
    assert not defined._matches_definition(*other, False)
    assert defined._matches_definition(*plain, False)


@pytest.mark.parametrize(
    "owner, setting, values",
    (
        (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", (True, False)),
        (torch.backends.cuda.matmul, "fp32_precision", ("ieee", "tf32")),  # torch's newer setting, after which the
        (torch.backends, "fp32_precision", ("ieee", "tf32")),  # getters of the older ones raise
    ),
)
def test_settings_of_torch_distinguish_products(owner, setting, values):
    before, seen = getattr(owner, setting), set()
    try:
        for value in values:
            setattr(owner, setting, value)
            seen.add(cublas_product.settings())
        if setting == "fp32_precision":
            with pytest.raises(RuntimeError):
                torch.get_float32_matmul_precision()
    finally:
        setattr(owner, setting, before)
    assert len(seen) == 2


@pytest.mark.parametrize("add", (False, True))
def test_live_operands_are_checked_on_request(library, monkeypatch, add):
    library(lies_about_large_numbers)
    a, b, out = cancelling_operands((16, 64, 16), torch.bfloat16, torch.float32)
    expected = in_order(a, b, out.clone(), add)
    monkeypatch.setattr(cublas_product, "checking", lambda: True)
    assert same_bits(defined.compute(a, b, out, add), expected)
    with pytest.raises(
        RunError,
        match=r"TPI_CHECK_PRODUCTS=1: cuBLAS's GEMM of \[16, 64\] and \[64, 16\] is not bitwise identical to the fixed",
    ):
        defined.compute(a * 1000, b, out, add)
    monkeypatch.setattr(cublas_product, "checking", lambda: False)
    defined.compute(a * 1000, b, out, add)  # the control: nobody asks
