"""What computes the defined product on a GPU: every bit of the recorded cases, whatever lies beside a row or column."""

import pytest
import torch

from tests.operands import same_bits
from tp_invariant_recipes.kernels.products.fixed_tile_product import fixed_tile_product
from tp_invariant_recipes.kernels.products.grouped_product import Groups, grouped_product
from tp_invariant_recipes.numerics.products import cublas, defined
from tp_invariant_recipes.numerics.products.defined import by_fixed_tiles
from tp_invariant_recipes.numerics.products.probe import cancelling
from tp_invariant_recipes.numerics.products.product import product
from tp_invariant_recipes.portable import conformance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("settings_of_a_run"),
]
BF16, FP32 = torch.bfloat16, torch.float32
CASES = conformance.read().cases


def by_grouped_tiles(a, b, out, add):
    assert not add
    rows = Groups((len(a),), torch.tensor([len(a)], device="cuda"))
    grouped_product(a.contiguous(), [b.contiguous()], out, rows, transposed=False)


TILES = (by_fixed_tiles, by_grouped_tiles)


@pytest.fixture(autouse=True)
def _nothing_is_decided(monkeypatch):
    monkeypatch.setattr(defined, "_cublas_is_exact", {})


def whole(way, a, b):
    out = torch.empty(a.shape[0], b.shape[1], device="cuda")
    way(a, b, out, False)
    return out


@pytest.mark.parametrize("way", TILES, ids=lambda way: way.__name__)
def test_it_gives_what_is_recorded(way):
    recorded = tuple(case for case in CASES if case.a.dtype == BF16 or way is by_fixed_tiles)
    assert {case.a.dtype for case in recorded} == ({BF16, FP32} if way is by_fixed_tiles else {BF16})
    result = conformance.differences(conformance.Recording("", recorded), lambda a, b: whole(way, a.cuda(), b.cuda()))
    assert result == []


# Products whose k cuBLAS splits on an H200.
SPLIT = ((BF16, 64, 32768, 64), (FP32, 64, 40, 64), (FP32, 64, 1024, 64))


def split_operands(dtype, m, k, n):
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(*size, generator=generator, device="cuda").to(dtype) for size in ((m, k), (k, n)))
    return a, b


@pytest.mark.parametrize("dtype, m, k, n", SPLIT, ids=str)
def test_a_product_whose_k_cublas_splits_is_that_of_fixed_tiles(dtype, m, k, n):
    a, b = split_operands(dtype, m, k, n)
    result = product(a, b, torch.empty(m, n, device="cuda"))
    assert list(defined._cublas_is_exact.values()) == [False]
    assert same_bits(result, whole(by_fixed_tiles, a, b))
    assert not same_bits(result, whole(cublas.launch, a, b))  # the control


# --- shards together and apart ---

# kind of product -> whether a and b are transposed in memory and whether it is added to an fp32 output, as layers do.
KINDS = {
    "forward": (False, True, False),
    "input gradient": (False, False, False),
    "weight gradient": (True, False, True),
}
SIZES = {BF16: (2048, 32768, 1536), FP32: (2048, 1024, 1536)}  # m, k, n
CORNER = slice(0, 64)  # of rows and columns


def operands(kind, dtype):
    """Cancelling numbers, so that a bf16 output shows every order: a, b, what there is in the output, add."""
    (m, k, n), (first, second, add) = SIZES[dtype], KINDS[kind]
    a = torch.empty(k, m, device="cuda", dtype=dtype).t() if first else torch.empty(m, k, device="cuda", dtype=dtype)
    b = torch.empty(n, k, device="cuda", dtype=dtype).t() if second else torch.empty(k, n, device="cuda", dtype=dtype)
    cancelling(a, b, torch.Generator("cuda").manual_seed(1))
    there = torch.randn(m, n, device="cuda") * 2.0**-16
    return a, b, there if add else there.to(dtype), add


def pieces(a, b, there):
    """Halves, eighths and 64 rows or columns: the operands, and the part of the output."""
    m, n = there.shape
    for width in (m // 2, m // 8, 64):
        for start in (0, m - width):
            yield a[start : start + width], b, (slice(start, start + width), slice(None))
    for width in (n // 2, n // 8, 64):
        for start in (0, n - width):
            yield a, b[:, start : start + width], (slice(None), slice(start, start + width))
    yield a[CORNER], b[:, CORNER], (CORNER, CORNER)


@pytest.mark.parametrize("dtype", (BF16, FP32), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_separate_rows_and_columns_have_the_bits_of_the_whole(kind, dtype):
    """In the place of a slice and as copies; whatever computes each, it is that of fixed tiles."""
    a, b, there, add = operands(kind, dtype)
    batched = product(a, b, there.clone(), rows=8, add=add)
    assert same_bits(batched, fixed_tile_product(a, b, there.clone(), add=add))
    for x, y, where in pieces(a, b, there):
        in_place = there.clone()
        assert same_bits(product(x, y, in_place[where], add=add), batched[where])
        assert same_bits(product(x.clone(), y.clone(), there[where].clone(), add=add), batched[where])
    decided = dict(defined._cublas_is_exact)
    print(f"\n{kind}, {dtype}: {sum(decided.values())} of {len(decided)} kinds of product by cuBLAS")
    # An H200's cuBLAS adds products of fp32 to the output in another way.
    assert any(decided.values()) == ((kind, dtype) != ("weight gradient", FP32))


@pytest.mark.parametrize("dtype", (BF16, FP32), ids=str)
def test_those_of_cublas_alone_do_not(dtype):
    """The control: cuBLAS splits k of some small ones."""
    different = []
    for kind in KINDS:
        a, b, there, add = operands(kind, dtype)
        batched = cublas.launch(a, b, there.clone(), add)
        for x, y, where in pieces(a, b, there):
            if not same_bits(cublas.launch(x, y, there[where].clone(), add), batched[where].contiguous()):
                different.append(f"{kind} {[*x.shape]} @ {[*y.shape]}")
    print(f"\n{dtype}:", *different, sep="\n  ")
    assert different


# --- CUDA graphs ---


@pytest.mark.parametrize("warm", (True, False), ids=("the kernel is there", "the kernel is compiled in the capture"))
def test_a_product_that_a_capture_meets_first_is_that_of_fixed_tiles(warm):
    """cuBLAS would have other bits."""
    a, b = split_operands(*((BF16, 64, 32768, 64) if warm else (FP32, 63, 1023, 65)))
    out = torch.zeros(a.shape[0], b.shape[1], device="cuda")
    if warm:
        whole(by_fixed_tiles, a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product(a, b, out)
    assert defined._cublas_is_exact == {}
    assert not out.any()
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(out, whole(by_fixed_tiles, a, b))
    assert not same_bits(out, whole(cublas.launch, a, b))  # the control
