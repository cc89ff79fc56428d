"""The trial that decides whether a library's product may stand for the definition: it sees a library that lies.

It runs on a CPU here, with libraries made for it; tests/gpu/test_product_probe_gpu.py asks cuBLAS.
"""

import pytest
import torch

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.numerics import cublas_product
from tp_invariant_recipes.numerics import product as products
from tp_invariant_recipes.numerics.probe_operands import cancelling

DTYPES = (torch.bfloat16, torch.float32)
SHAPES = ((128, 16, 128), (64, 4096, 64), (33, 17, 40), (2, 8, 2048))  # m, k, n
DRAWS = 40


def in_order(a, b, out, add=False):
    """What the libraries below claim to be: fp32 over k in order, rounded once."""
    total = torch.zeros(out.shape)
    for x, y in zip(a.float().t(), b.float(), strict=True):
        total += x[:, None] * y[None, :]
    return out.copy_(total + out.float() if add else total)


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


@pytest.fixture
def library(monkeypatch):
    """Have a product made in one launch by the function given, and shard by shard by `in_order`."""

    def use(in_place):
        monkeypatch.setattr(products, "_in_place", lambda a, b, out, add: in_place(a, b, out, add))
        monkeypatch.setattr(
            products,
            "_multiplied",
            lambda a, b, dtype: in_order(a, b, a.new_empty(a.shape[0], b.shape[1], dtype=dtype)),
        )

    return use


def operands(shape, dtype, out_dtype=None):
    m, k, n = shape
    return torch.empty(m, k, dtype=dtype), torch.empty(k, n, dtype=dtype), torch.empty(m, n, dtype=out_dtype or dtype)


def accepted(shape, dtype, *, add=False, rows=1, columns=1, out_dtype=None) -> bool:
    return products._seen_to_be_right(*operands(shape, dtype, out_dtype), rows, columns, add)


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


def test_every_draw_shows_what_normal_numbers_hide():
    """The control of the operands: 128 x 16 x 128 in bf16, k cut in half."""
    shown = {"cancelling": 0, "normal": 0}
    for seed in range(DRAWS):
        generator = torch.Generator().manual_seed(seed)
        a, b, out = operands((128, 16, 128), torch.bfloat16)
        for kind in shown:
            if kind == "cancelling":
                cancelling(a, b, generator)
            else:
                a.copy_(torch.randn(a.shape, generator=generator))
                b.copy_(torch.randn(b.shape, generator=generator))
            first, second = in_order(a, b, out.clone()), split_in_half(a, b, out.clone())
            shown[kind] += not products.same_bits(first, second)
    assert shown["cancelling"] == DRAWS
    assert shown["normal"] < DRAWS  # nearly blind


def test_every_exact_result_is_zero():
    a, b, _ = operands((8, 33, 8), torch.bfloat16)
    cancelling(a, b, torch.Generator().manual_seed(0))
    assert not (a.double() @ b.double()).abs().gt(1e-12).any()
    assert a.ne(0).sum() == 8 * 32


def test_a_layout_that_the_library_does_not_take_is_multiplied_shard_by_shard(library):
    def refuses(a, b, out, add):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx(…)`")

    library(refuses)
    assert not accepted((8, 8, 8), torch.bfloat16)


@pytest.mark.parametrize(
    "error", (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("an illegal memory access"))
)
def test_any_other_error_is_one(library, error):
    def fails(a, b, out, add):
        raise error

    library(fails)
    with pytest.raises(RuntimeError) as raised:
        accepted((8, 8, 8), torch.bfloat16)
    assert raised.value is error


def test_settings_of_torch_tell_products_apart():
    before = cublas_product.settings()
    matmul = torch.backends.cuda.matmul
    allowed = matmul.allow_bf16_reduced_precision_reduction
    try:
        matmul.allow_bf16_reduced_precision_reduction = not allowed
        assert cublas_product.settings() != before
    finally:
        matmul.allow_bf16_reduced_precision_reduction = allowed
    assert cublas_product.settings() == before


@pytest.mark.parametrize("add", (False, True))
def test_live_operands_are_checked_on_request(library, add):
    """A library that lies about numbers that the trial does not have."""

    def lies_about_large_numbers(a, b, out, add=False):
        return (split_in_half if a.abs().max() > 100 else in_order)(a, b, out, add)

    library(lies_about_large_numbers)
    a, b, out = operands((16, 64, 16), torch.bfloat16, torch.float32)
    assert products._seen_to_be_right(a, b, out, 1, 1, add)
    generator = torch.Generator().manual_seed(0)
    cancelling(a, b, generator)
    out.zero_()
    assert products._checked(a, b, out, 1, 1, add) is out
    with pytest.raises(
        RunError, match=r"TPI_CHECK_PRODUCTS=1: a product \[16, 64\] @ \[64, 16\] in one launch has other bits"
    ):
        products._checked(a * 1000, b, out, 1, 1, add)
