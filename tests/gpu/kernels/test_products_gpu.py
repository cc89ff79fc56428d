# SPDX-License-Identifier: Apache-2.0
"""Products on one GPU, by fixed tiles and by cuBLAS where the trial lets it: in bf16, in fp32, in FP8 of every kind.

No bit depends on what lies beside a row or a column, or on where it lies. kernel_table.py compares FP8 with a CPU. Run
with -s to see what the trial decides.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product as product_of
from typing import Any

import pytest
import torch

from tests import fp8_operands, fp8_recorded, kernel_table
from tests.gpu.kernels.operands import normal_on_gpu
from tests.operands import same_bits
from tp_invariant_recipes.kernels.cpu import fp8_cpu
from tp_invariant_recipes.kernels.gemm import fp8_tiles
from tp_invariant_recipes.kernels.gemm.fixed_tile_gemm import fixed_tile_gemm
from tp_invariant_recipes.kernels.gemm.grouped_gemm import Groups, grouped_gemm
from tp_invariant_recipes.kernels.gemm.quantize import BLOCK, E4M3, E5M2, Quantized
from tp_invariant_recipes.numerics.gemm import cublas, defined, fp8, fp8_cublas
from tp_invariant_recipes.numerics.gemm.defined import by_fixed_tile_gemm
from tp_invariant_recipes.numerics.gemm.gemm import gemm, require_order
from tp_invariant_recipes.numerics.gemm.probe import DRAWS, cancelling
from tp_invariant_recipes.numerics.layers.linear import column_parallel, row_parallel
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.portable import conformance

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("settings_of_a_run")]
BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = (FP32, BF16)


def drawn_fp8(kind, m, n, k, types):
    """Random FP8 operands on the GPU: normal numbers, scales around one."""
    results = []
    for x in fp8_operands.shapes(kind, m, n, k):
        dtype = types[len(results)]
        data = (torch.randn(x.rows, k, device="cuda") * 8).clamp(-448, 448).to(dtype)
        scale = torch.rand(x.scale[::-1], device="cuda").add_(0.5)
        results.append(Quantized(data, scale.t() if x.scale else scale, x.blocks))
    return results


def generator(seed=1):
    return torch.Generator("cuda").manual_seed(seed)


@dataclass(frozen=True)
class Form:
    """A kind of operands.

    drawn:  of m, k, n. cancel: fills them with numbers whose sums cancel. rows, columns: a part of either, by a slice.
    ways:   the product that layers call, by fixed tiles, by cuBLAS alone. known: what the trial has decided.
    outs:   dtypes of outputs, with whether the product is added.
    """

    drawn: Callable[..., tuple[Any, Any]]
    cancel: Callable[..., None]
    rows: Callable[..., Any]
    columns: Callable[..., Any]
    product: Callable[..., Any]
    tiles: Callable[..., Any]
    cublas: Callable[..., Any]
    known: Callable[[], dict]
    outs: tuple[tuple[torch.dtype, bool], ...]
    split: tuple[int, int, int]  # m, k, n of a product whose k cuBLAS splits on an H200


def _plain(dtype):
    return Form(
        lambda m, k, n: (normal_on_gpu(m, k, dtype=dtype), normal_on_gpu(k, n, dtype=dtype)),
        lambda a, b: cancelling(a, b, generator()),
        lambda a, rows: a[rows], lambda b, columns: b[:, columns],
        lambda a, b, out, add: gemm(a, b, out, add=add), by_fixed_tile_gemm, cublas.launch,
        lambda: defined._cublas_is_exact, ((dtype, False), (FP32, True)),
        (64, 32768, 64) if dtype == BF16 else (64, 1024, 64),
    )  # fmt: skip


def _of_rows(x, rows):
    return x.of_rows(rows.start, rows.stop - rows.start)


def _fp8(kind, types=(E4M3, E4M3)):
    return Form(
        lambda m, k, n: tuple(drawn_fp8(kind, m, n, k, types)), lambda a, b: DRAWS[1](a, b, generator()),
        _of_rows, _of_rows, lambda a, b, out, add: fp8.gemm(a, b, out, add=add), fp8_tiles.gemm,
        fp8_cublas.launch, lambda: fp8_cublas._is_exact, ((FP32, False), (BF16, False), (FP32, True)), (64, 24576, 64),
    )  # fmt: skip


FORMS = {"bf16": _plain(BF16), "fp32": _plain(FP32)} | {f"FP8, {kind}": _fp8(kind) for kind in fp8_operands.KINDS}
PLAIN = tuple(FORMS)[:2]


@pytest.fixture(autouse=True)
def _nothing_is_decided(monkeypatch):
    monkeypatch.setattr(defined, "_cublas_is_exact", {})
    monkeypatch.setattr(fp8_cublas, "_is_exact", {})


def output(m, n, dtype):
    return torch.randn(m, n, device="cuda").to(dtype)


def by(way, a, b, there, add=False):
    """What a way makes of an output."""
    out = there.clone()
    way(a, b, out, add)
    return out


# --- what is recorded ---


def by_grouped_tiles(a, b, out, add):
    rows = Groups((len(a),), torch.tensor([len(a)], device="cuda"))
    grouped_gemm(a.contiguous(), [b.contiguous()], out, rows, transposed=False)


@pytest.mark.parametrize("way", (by_fixed_tile_gemm, by_grouped_tiles), ids=lambda way: way.__name__)
def test_tiles_give_what_is_recorded(way):
    cases = tuple(case for case in conformance.read().cases if case.a.dtype == BF16 or way is by_fixed_tile_gemm)
    assert {case.a.dtype for case in cases} == ({BF16, FP32} if way is by_fixed_tile_gemm else {BF16})

    def whole(a, b):
        return by(way, a.cuda(), b.cuda(), torch.empty(a.shape[0], b.shape[1], device="cuda"))

    assert conformance.differences(conformance.Recording("", cases), whole) == []


@pytest.mark.parametrize("case", fp8_recorded.SPLIT)
def test_tiles_of_fp8_give_what_is_recorded(case):
    a, b, forms = fp8_recorded.recorded(case)
    out = torch.empty(len(a.data), len(b.data), device="cuda")
    fp8_tiles.gemm(kernel_table.moved(a), kernel_table.moved(b), out, False)
    same = fp8_recorded.same_as_recorded(out.cpu(), forms)
    assert same
    assert all(same.values()), same


def test_tiles_walk_k_in_order():
    """tests/unit/numerics/gemm/test_cpu_product.py shows that the check sees other orders."""
    require_order.cache_clear()
    require_order("cuda:0")


@pytest.mark.parametrize("kind", fp8_operands.KINDS)
def test_subnormal_numbers_have_the_exponent_of_the_smallest_normal_one(kind):
    """By cuBLAS and fixed tiles: a has subnormal numbers alone, b any; no recorded case has them as the largest."""
    for dtype, least in ((E4M3, 8), (E5M2, 4)):
        a, b = drawn_fp8(kind, 64, 64, 512, (dtype, E4M3))
        signs = 128 * torch.randint(0, 2, a.data.shape, device="cuda")
        a.data.copy_((torch.randint(0, least, a.data.shape, device="cuda") + signs).to(torch.uint8).view(dtype))
        spread = torch.exp2(torch.randint(-7, 7, (64, 512), device="cuda"))
        b.data.copy_((torch.randn(64, 512, device="cuda") * spread).to(E4M3))
        expected = fp8_cpu.gemm(*(Quantized(x.data.cpu(), x.scale.cpu(), x.blocks) for x in (a, b)))
        for way in (fp8_tiles.gemm, fp8_cublas.launch):
            assert same_bits(by(way, a, b, torch.empty(64, 64, device="cuda")).cpu(), expected), way


def test_fast_accumulation_has_other_bits():
    """The control: what stock's forward pass computes."""
    a, b = drawn_fp8("tensor", 256, 256, 4096, (E4M3, E4M3))
    result = fp8.gemm(a, b, torch.empty(256, 256, device="cuda"))
    fast = torch._scaled_mm(a.data, b.data.t(), a.scale, b.scale, out_dtype=FP32, use_fast_accum=True)
    assert (result != fast).float().mean() > 0.5


# --- fixed tiles ---

# m, k, n: Qwen3-0.6B and 8B with 2048 tokens (forward, input gradient, weight gradient), small and ragged ones.
SHAPES = (
    (2048, 1024, 6144), (2048, 6144, 1024), (6144, 2048, 1024), (2048, 12288, 4096), (16, 64, 24), (130, 200, 190),
    (1000, 515, 333),
)  # fmt: skip


def _tiled(a, b, dtype=FP32):
    return fixed_tile_gemm(a, b, torch.empty(a.shape[0], b.shape[1], dtype=dtype, device="cuda"))


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_are_correct_and_round_once_and_a_slice_is_that_of_slices(shape, name):
    a, b = FORMS[name].drawn(*shape)
    whole, reference = _tiled(a, b), a.double() @ b.double()
    assert (whole - reference).norm() < 1e-4 * reference.norm()  # tensor cores cut where others round
    assert same_bits(_tiled(a, b, BF16), whole.bfloat16())
    there = torch.randn_like(whole)
    assert same_bits(fixed_tile_gemm(a, b, there.clone(), add=True), whole + there)
    for rows in (slice(0, 1), slice(1, 3), slice(shape[0] // 3, None), slice(shape[0] // 8), slice(None)):
        for columns in (slice(0, 1), slice(2, 7), slice(shape[2] // 2 + 1, None), slice(shape[2] // 8), slice(None)):
            assert same_bits(_tiled(a[rows], b[:, columns]), whole[rows, columns])
            assert same_bits(_tiled(a[rows].clone(), b[:, columns].clone()), whole[rows, columns])


def _layouts(matrix):
    """By rows, by columns, either with gaps that leave rows on odd addresses, and with gaps that do not."""
    yield from (matrix, matrix.t().contiguous().t())
    rows, columns = matrix.shape
    for before, after in ((1, 2), (16, 16)):
        yield matrix.new_zeros(rows, before + columns + after)[:, before:-after].copy_(matrix)
        yield matrix.new_zeros(columns, before + rows + after)[:, before:-after].t().copy_(matrix)
    yield matrix.new_zeros(rows, columns, 2)[..., 0].copy_(matrix)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("shape", SHAPES[-4:], ids=str)
def test_the_layout_in_memory_changes_no_bit(shape, name):
    """Each of these is another binary."""
    a, b = FORMS[name].drawn(*shape)
    whole = _tiled(a, b)
    for x in _layouts(a):
        for y in _layouts(b):
            assert same_bits(_tiled(x, y), whole)
    for out in _layouts(torch.zeros_like(whole)):
        assert same_bits(fixed_tile_gemm(a, b, out), whole)


def test_elements_beyond_two_to_the_31st_have_their_place():
    m, k, n = 50_000, 64, 50_048
    a, b = FORMS["bf16"].drawn(m, k, n)
    whole = _tiled(a, b, BF16)
    assert whole.numel() > 2**31
    for rows in (slice(0, 200), slice(m - 200, m)):
        assert same_bits(whole[rows], _tiled(a[rows], b, BF16))
    there = whole.t()  # the same numbers by columns, as what is multiplied
    few = normal_on_gpu(8, n, dtype=BF16)
    assert same_bits(_tiled(few, there)[:, -100:], _tiled(few, there[:, -100:].clone()))


# --- cuBLAS and fixed tiles: shards together and apart ---

# Products of plain numbers -> whether a and b are transposed in memory, and whether it is added, as layers do.
KINDS = {
    "forward": (False, True, False), "input gradient": (False, False, False), "weight gradient": (True, False, True),
}  # fmt: skip
SIZES = {"bf16": (2048, 32768, 1536), "fp32": (2048, 1024, 1536)}  # m, k, n; of FP8 the last line below


def _laid_out(name, kind):
    """Cancelling numbers, so that a bf16 output shows every order: the operands, what there is in the output, add."""
    form, (m, k, n), (first, second, add) = FORMS[name], SIZES.get(name, (1024, 2048, 1536)), KINDS[kind]
    a, b = form.drawn(m, k, n)
    if name in PLAIN:
        a, b = (x.t().contiguous().t() if turned else x for x, turned in ((a, first), (b, second)))
    form.cancel(a, b)
    there = torch.randn(m, n, device="cuda") * 2.0**-16
    return a, b, there if add else there.to(a.dtype if name in PLAIN else BF16), add


def _pieces(form, a, b, there):
    """Halves, eighths and 128 rows or columns: the operands, and the part of the output."""
    m, n = there.shape
    for width in (m // 2, m // 8, 128):
        for start in (0, m - width):
            part = slice(start, start + width)
            yield form.rows(a, part), b, (part, slice(None))
    for width in (n // 2, n // 4, 128):
        for start in (0, n - width):
            part = slice(start, start + width)
            yield a, form.columns(b, part), (slice(None), part)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_separate_rows_and_columns_have_the_bits_of_the_whole(kind, name):
    """In the place of a slice and as copies; whatever computes each, it is that of fixed tiles."""
    form = FORMS[name]
    a, b, there, add = _laid_out(name, kind)
    whole = by(form.gemm, a, b, there, add)
    assert same_bits(whole, by(form.tiles, a, b, there, add))
    if name in PLAIN:
        assert same_bits(gemm(a, b, there.clone(), rows=8, add=add), whole)
    for x, y, where in _pieces(form, a, b, there):
        in_place = there.clone()
        form.gemm(x, y, in_place[where], add)
        assert same_bits(in_place[where], whole[where])
        assert same_bits(by(form.gemm, x, y, there[where], add), whole[where])
    decided = form.known()
    print(f"\n{kind}, {name}: {sum(decided.values())} of {len(decided)} kinds of product by cuBLAS")
    if name in PLAIN:  # an H200's cuBLAS adds products of fp32 to the output in another way
        assert any(decided.values()) == ((kind, name) != ("weight gradient", "fp32"))


@pytest.mark.parametrize("name", PLAIN)
def test_those_of_cublas_alone_have_not(name):
    """The control: cuBLAS splits k of some small ones."""
    form, different = FORMS[name], []
    for kind in KINDS:
        a, b, there, add = _laid_out(name, kind)
        whole = by(form.cublas, a, b, there, add)
        for x, y, where in (*_pieces(form, a, b, there), (a[:64], b[:, :64], (slice(0, 64), slice(0, 64)))):
            if not same_bits(by(form.cublas, x, y, there[where], add), whole[where].contiguous()):
                different.append(f"{kind} {[*x.shape]} @ {[*y.shape]}")
    print(f"\n{name}:", *different, sep="\n  ")
    assert different


@pytest.mark.parametrize("name", (*PLAIN, "FP8, tensor"))
def test_a_product_whose_k_cublas_splits_is_that_of_fixed_tiles(name):
    form, differ = FORMS[name], 0
    m, k, n = form.split
    for fill in DRAWS if "FP8" in name else (lambda *_: None,):
        a, b = form.drawn(m, k, n)
        fill(a, b, generator(3))
        there = torch.zeros(m, n, device="cuda")
        result = by(form.gemm, a, b, there)
        assert list(form.known().values()) == [False]
        assert same_bits(result, by(form.tiles, a, b, there))
        differ += not same_bits(result, by(form.cublas, a, b, there))
    assert differ  # the control


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("warm", (True, False), ids=("the kernel is there", "the kernel is compiled in the capture"))
def test_a_product_that_a_capture_meets_first_is_that_of_fixed_tiles(warm, name):
    """cuBLAS would have other bits."""
    form = FORMS[name]
    m, k, n = form.split if name in PLAIN else (256, 1024, 256)
    a, b = form.drawn(*((m, k, n) if warm or name not in PLAIN else (m - 1, k - 1, n + 1)))
    out = torch.zeros(len(a) if name in PLAIN else m, b.shape[1] if name in PLAIN else n, device="cuda")
    if warm:
        by(form.tiles, a, b, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        form.gemm(a, b, out, False)
    assert form.known() == {}
    assert not out.any()
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(out, by(form.tiles, a, b, out))
    if name in PLAIN:
        assert not same_bits(out, by(form.cublas, a, b, out))  # the control


# m, k, n of shards of Qwen3-0.6B and 8B at V = 8 and 4, and of their layers at 2048 tokens.
SHARDS = (
    (2048, 1024, 384), (2048, 4096, 1536), (2048, 1536, 4096), (2048, 512, 4096), (2048, 4096, 768),
    (8192, 4096, 3072),
)  # fmt: skip
LAYERS = ((2048, 1024, 4096), (2048, 1024, 3072), (2048, 4096, 4096), (2048, 12288, 4096), (4096, 2048, 1024))


FP8_FORMS = product_of(fp8_operands.KINDS, fp8_operands.TYPES[:2], ((FP32, False), (BF16, False), (FP32, True)))


@pytest.mark.parametrize("name, types, out", (*((name, None, None) for name in PLAIN), *FP8_FORMS), ids=str)
def test_the_trial_takes_cublas(name, types, out):
    """For shards of a model, without gaps and not added to anything: a trial that always refuses fails here."""
    form, shapes = (FORMS[name], SHARDS) if types is None else (_fp8(name, types), LAYERS)
    outs = (out,) if out else {(dtype, False) for dtype, _ in form.outs}
    for (m, k, n), (dtype, add) in ((shape, out) for shape in shapes for out in outs):
        a, b = form.drawn(m, k, n)
        there = output(m, n, dtype)
        assert same_bits(by(form.gemm, a, b, there, add), by(form.tiles, a, b, there, add))
    decided = [*form.known().values()]
    print(sum(decided), "of", len(decided), "kinds of product by cuBLAS")
    assert len(decided) == len(shapes) * len(outs)
    assert any(decided)
    assert name == "fp32" or all(decided)


@pytest.mark.parametrize("kind", fp8_operands.KINDS)
def test_cublas_computes_a_shard_of_k_in_its_place(kind):
    a, b = drawn_fp8(kind, 512, 1024, 4096, (E4M3, E4M3))
    for add in (False, True):
        for part in ((0, 1024), (1024, 1024), (BLOCK, 2048)):
            there, parts = output(512, 1024, FP32), (a.along_k(*part), b.along_k(*part))
            expected = by(fp8_tiles.gemm, *parts, there, add)
            assert same_bits(fp8.gemm(*parts, there, add=add), expected)
    assert all(fp8_cublas._is_exact.values())


def test_weight_gradients_of_experts_need_whole_blocks():
    sizes = (16, 0, 48, 144)
    operands = fp8_operands.operands("1x128", 8, 8, sum(sizes), fp8_operands.TYPES[1])
    with pytest.raises(ValueError, match="pad each with zeros"):
        fp8.grouped_weight_gradient(*operands, [], Groups(sizes, torch.tensor(sizes)))


# --- the trial on what layers multiply ---

# name: V, then (kind, features in, features out, segments) of each linear layer, as in conf/model/
COLUMN, ROW = column_parallel, row_parallel
MODELS = {
    "qwen3_0p6b": (8, ((COLUMN, 1024, 4096, 1), (ROW, 2048, 1024, 1), (COLUMN, 1024, 6144, 2), (ROW, 3072, 1024, 1))),
    "qwen3_8b": (8, ((COLUMN, 4096, 6144, 1), (ROW, 4096, 4096, 1), (COLUMN, 4096, 24576, 2), (ROW, 12288, 4096, 1))),
    "qwen3_30b_a3b": (4, ((COLUMN, 2048, 5120, 1), (ROW, 4096, 2048, 1))),
    "qwen3_0p6b output layer": (8, ((COLUMN, 1024, 151936, 1),)),
    "qwen3_8b output layer": (8, ((COLUMN, 4096, 151936, 1),)),
}


@pytest.mark.parametrize("tokens", (2048, 8192))
@pytest.mark.parametrize("degree", (1, 2, 4))
@pytest.mark.parametrize("model", MODELS)
def test_every_product_of_a_layer_holds_on_live_operands(monkeypatch, model, degree, tokens):
    """Forward, input and weight gradient with TPI_CHECK_PRODUCTS=1: random, wide and cancelling operands."""
    monkeypatch.setattr(cublas, "checking", lambda: True)
    shards, layers = MODELS[model]
    mesh = VirtualMesh(shards // degree, 1, 0)  # a rank of tp=degree, with nobody to talk to: only products count
    for layer, k, n, segments in layers:
        k, n = {COLUMN: (k, n // degree), ROW: (k // degree, n)}[layer]
        for values in ("normal", "wide", "cancelling"):
            x, weight = normal_on_gpu(tokens, 1, k, dtype=BF16), normal_on_gpu(n, k, dtype=BF16)
            if values == "wide":
                x = (x.float() * torch.randint(-12, 12, (k,), device="cuda").float().exp2()).bfloat16()
            if values == "cancelling":
                cancelling(x[:, 0], weight.t(), generator())
            weight.main_grad = torch.zeros(weight.shape, device="cuda")
            y = layer(
                x.requires_grad_(), weight.requires_grad_(), mesh,
                *((segments, False) if layer is COLUMN else (False,)),
            )  # fmt: skip
            for _ in range(2):  # the second adds to the gradient of the first
                y.backward(torch.randn_like(y), retain_graph=True)
    decided = defined._cublas_is_exact
    print(f"\n{model} tp={degree} {tokens} tokens: {sum(decided.values())} of {len(decided)} by cuBLAS")
    print(*(f"  fixed tiles: {key[:8]}" for key, exact in decided.items() if not exact), sep="\n")
    assert any(decided.values())  # a trial that always refuses fails here


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_with_k_in_another_order_is_refused(monkeypatch, dtype):
    """The control: cuBLAS itself, on operands that are cut in half along k."""
    launch = cublas.launch

    def in_halves(a, b, out, add):
        half, total = a.shape[1] // 2, torch.zeros(out.shape, device="cuda")
        for part in (slice(0, half), slice(half, None)):
            launch(a[:, part].contiguous(), b[part].contiguous(), total, True)
        return out.copy_(total + out.float() if add else total)

    monkeypatch.setattr(cublas, "launch", in_halves)
    for m, k, n in ((128, 16, 128), (2048, 1024, 384), (2048, 4096, 768)):
        a, b, out = (torch.empty(*shape, device="cuda", dtype=dtype) for shape in ((m, k), (k, n), (m, n)))
        assert not defined._matches_definition(a, b, out, False), (m, k, n)
