"""FP8 products on a Hopper GPU: every bit of the definition, by fixed tiles and by cuBLAS where the trial lets it."""

import pytest
import torch

from tests.fp8_operands import KINDS, TYPES, operands
from tests.fp8_recorded import SPLIT, recorded, same_as_recorded
from tests.operands import same_bits
from tp_invariant_recipes.kernels.cpu import fp8_cpu
from tp_invariant_recipes.kernels.products import fp8_tiles
from tp_invariant_recipes.kernels.products.grouped_product import Groups
from tp_invariant_recipes.kernels.products.quantize import BLOCK, E4M3, E5M2, Quantized
from tp_invariant_recipes.numerics.products import fp8, fp8_cublas
from tp_invariant_recipes.numerics.products.probe import DRAWS
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import tree_sum

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("settings_of_a_run")]
BF16, FP32 = torch.bfloat16, torch.float32
FORMS = ((FP32, False), (BF16, False), (FP32, True))  # of the output: its dtype, whether the product is added
FORM_NAMES = ["fp32", "bf16", "added"]


@pytest.fixture(autouse=True)
def _nothing_is_decided(monkeypatch):
    monkeypatch.setattr(fp8_cublas, "_is_exact", {})


def on_gpu(x):
    """A copy on the GPU; scales of 1x128 lie as Transformer Engine's do."""
    scale = x.scale.t().contiguous().cuda().t() if x.blocks == "1x128" else x.scale.cuda()
    return Quantized(x.data.cuda(), scale, x.blocks)


def drawn(kind, m, n, k, types):
    """Random operands on the GPU: normal numbers, scales around one."""
    blocks = -(-k // BLOCK)
    shapes = {
        "tensor": ((), ()),
        "1x128": ((m, blocks), (n, blocks)),
        "128x128": ((m, blocks), (-(-n // BLOCK), blocks)),
    }
    results = []
    for rows, shape, dtype, name in zip((m, n), shapes[kind], types, ("1x128" if kind != "tensor" else kind, kind)):  # noqa: B905
        data = (torch.randn(rows, k, device="cuda") * 8).clamp(-448, 448).to(dtype)
        scale = torch.rand(shape[::-1], device="cuda").add_(0.5)
        results.append(Quantized(data, scale.t() if shape else scale, name))
    return results


def output(m, n, dtype):
    return torch.randn(m, n, device="cuda").to(dtype)


# --- fixed tiles ---


@pytest.mark.parametrize("case", SPLIT)
def test_fixed_tiles_give_what_is_recorded(case):
    a, b, forms = recorded(case)
    out = torch.empty(len(a.data), len(b.data), device="cuda")
    fp8_tiles.product(on_gpu(a), on_gpu(b), out, False)
    same = same_as_recorded(out.cpu(), forms)
    assert same
    assert all(same.values()), same


@pytest.mark.parametrize("form", FORMS, ids=FORM_NAMES)
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_fixed_tiles_are_the_definition(kind, types, form):
    dtype, add = form
    for m, n, k in ((5, 7, 33), (130, 200, 1111), (256, 384, 4096), (1, 128, 128)):
        a, b = operands(kind, m, n, k, types)
        there = output(m, n, dtype)
        expected = fp8.product(a, b, there.cpu(), add=add)
        fp8_tiles.product(on_gpu(a), on_gpu(b), there, add)
        assert same_bits(there.cpu(), expected), (m, n, k)


@pytest.mark.parametrize("kind", KINDS)
def test_infinities_and_nan_are_those_of_the_definition(kind):
    a, b = operands(kind, 40, 135, 400, (E5M2, E4M3))
    for x, special in ((a, (0x7C, 0xFC, 0x7D, 0xFF)), (b, (0x7F, 0xFF))):
        raw = x.data.view(torch.uint8)
        for row in range(0, len(raw), 7):
            raw[row, row * 13 % 400] = special[row // 7 % len(special)]
    for dtype in (FP32, BF16):
        out = torch.empty(40, 135, device="cuda", dtype=dtype)
        fp8_tiles.product(on_gpu(a), on_gpu(b), out, False)
        assert same_bits(out.cpu(), fp8.product(a, b, torch.empty(40, 135, dtype=dtype)))


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_of_pieces_are_the_sums_of_two_products(kind):
    a, b = operands(kind, 70, 200, 1024, (E4M3, E4M3))
    for segments, shards, first, second in (((1024,), 4, 512, 768), ((512, 512), 1, 0, 512)):
        expected = fp8.nodes(a, b, VirtualMesh(shards, 1, 0), segments)[-1]
        out = torch.empty(70, 200, device="cuda")
        fp8_tiles.pair_of_pieces(on_gpu(a), on_gpu(b), out, False, first, 1024 // max(shards, 2), second)
        assert same_bits(out.cpu(), expected)


@pytest.mark.parametrize("graphs", (False, True), ids=("one launch", "by products"))
@pytest.mark.parametrize("kind", KINDS)
def test_nodes_of_a_rank_are_those_of_a_cpu(kind, graphs):
    a, b = operands(kind, 64, 256, 2048, (E5M2, E4M3))
    for segments in ((2048,), (1024, 1024)):
        expected = fp8.nodes(a, b, VirtualMesh(8, 2, 0), segments)
        result = fp8.nodes(on_gpu(a), on_gpu(b), VirtualMesh(8, 2, 0, graphs=graphs), segments)
        assert same_bits(tree_sum(result.cpu()), tree_sum(expected))  # each may have added some nodes already


@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_those_of_a_cpu(kind, dtype):
    sizes, n, k = (3, 0, 130, 257), 272, 512
    groups, on_cpu = (Groups(sizes, torch.tensor(sizes, device=device)) for device in ("cuda", "cpu"))
    x, _ = operands(kind, sum(sizes), n, k, (E4M3, E4M3))
    if kind == "tensor":
        x = Quantized(x.data, torch.rand(len(sizes)) + 0.5)
    weights = [operands(kind, 1, n, k, (E4M3, E4M3), seed=seed)[1] for seed in range(len(sizes))]
    expected = torch.empty(sum(sizes), n, dtype=dtype)
    fp8.grouped_product(x, weights, expected, on_cpu)
    out = torch.empty_like(expected, device="cuda")
    fp8.grouped_product(on_gpu(x), [on_gpu(weight) for weight in weights], out, groups)
    assert same_bits(out.cpu(), expected)


@pytest.mark.parametrize("sizes", ((128, 0, 256, 128), (16, 0, 48, 144), (3, 0, 130, 7)), ids=str)
@pytest.mark.parametrize("kind", ("tensor", "1x128"))
def test_weight_gradients_of_experts_are_those_of_a_cpu(kind, sizes):
    if kind == "1x128" and sizes[0] % BLOCK:
        with pytest.raises(ValueError, match="pad each with zeros"):
            fp8.grouped_weight_gradient(
                *operands(kind, 8, 8, sum(sizes), TYPES[1]), [], Groups(sizes, torch.tensor(sizes))
            )
        return
    dy, x = operands(kind, 144, 272, sum(sizes), (E5M2, E4M3))
    if kind == "tensor":
        dy, x = (Quantized(item.data, torch.rand(len(sizes)) + 0.5) for item in (dy, x))
    groups = Groups(sizes, torch.tensor(sizes, device="cuda"))
    for chain in ((0,), (1, 0), (0, 2, 1, 3)):
        there = torch.randn(len(sizes) // len(chain), 144, 272)
        expected, out = there.clone(), there.cuda()
        fp8.grouped_weight_gradient(dy, x, list(expected), Groups(sizes, torch.tensor(sizes)), chain)
        fp8.grouped_weight_gradient(on_gpu(dy), on_gpu(x), list(out), groups, chain)
        assert same_bits(out.cpu(), expected), chain


# --- cuBLAS ---

# m, n, k of Qwen3-0.6B and 8B at 2048 tokens: forward products, input gradients, and weight gradients over tokens.
SHAPES = ((2048, 4096, 1024), (2048, 3072, 1024), (2048, 4096, 4096), (2048, 4096, 12288), (4096, 1024, 2048))


@pytest.mark.parametrize("form", FORMS, ids=FORM_NAMES)
@pytest.mark.parametrize("types", TYPES[:2], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_cublas_computes_products_of_layers_with_the_bits_of_fixed_tiles(kind, types, form):
    dtype, add = form
    for m, n, k in SHAPES:
        a, b = drawn(kind, m, n, k, types)
        there = output(m, n, dtype)
        expected = there.clone()
        fp8_tiles.product(a, b, expected, add)
        assert same_bits(fp8.product(a, b, there, add=add), expected)
    assert list(fp8_cublas._is_exact.values()) == [True] * len(SHAPES)


@pytest.mark.parametrize("kind", KINDS)
def test_cublas_computes_a_shard_of_k_in_its_place(kind):
    a, b = drawn(kind, 512, 1024, 4096, (E4M3, E4M3))
    for add in (False, True):
        for start, size in ((0, 1024), (1024, 1024), (128, 2048)):
            there = output(512, 1024, FP32)
            expected = there.clone()
            parts = a.along_k(start, size), b.along_k(start, size)
            fp8_tiles.product(*parts, expected, add)
            assert same_bits(fp8.product(*parts, there, add=add), expected)
    assert all(fp8_cublas._is_exact.values())


@pytest.mark.parametrize("kind", KINDS)
def test_subnormal_numbers_have_the_exponent_of_the_smallest_normal_one(kind):
    """By cuBLAS and fixed tiles: a has subnormal numbers alone, b any; no recorded case has them as the largest."""
    for dtype, least in ((E4M3, 8), (E5M2, 4)):
        a, b = drawn(kind, 64, 64, 512, (dtype, E4M3))
        bits = torch.randint(0, least, a.data.shape, device="cuda") + 128 * torch.randint(
            0, 2, a.data.shape, device="cuda"
        )
        a.data.copy_(bits.to(torch.uint8).view(dtype))
        b.data.copy_(
            (torch.randn(64, 512, device="cuda") * torch.exp2(torch.randint(-7, 7, (64, 512), device="cuda"))).to(E4M3)
        )
        expected = fp8_cpu.product(*(Quantized(x.data.cpu(), x.scale.cpu(), x.blocks) for x in (a, b)))
        for product in (fp8_tiles.product, fp8_cublas.launch):
            out = torch.empty(64, 64, device="cuda")
            product(a, b, out, False)
            assert same_bits(out.cpu(), expected), product


def test_a_product_whose_k_cublas_splits_is_that_of_fixed_tiles():
    generator, differ = torch.Generator("cuda").manual_seed(3), 0
    for draw in DRAWS:
        a, b = drawn("tensor", 64, 64, 24576, (E4M3, E4M3))
        draw(a, b, generator)
        result = fp8.product(a, b, torch.empty(64, 64, device="cuda"))
        assert list(fp8_cublas._is_exact.values()) == [False]
        tiles, other = torch.empty(2, 64, 64, device="cuda")
        fp8_tiles.product(a, b, tiles, False)
        fp8_cublas.launch(a, b, other, False)
        assert same_bits(result, tiles)
        differ += not same_bits(other, tiles)
    assert differ  # the control


@pytest.mark.parametrize("kind", KINDS)
def test_separate_rows_and_columns_have_the_bits_of_the_whole(kind):
    m, n = 1024, 1536
    a, b = drawn(kind, m, n, 2048, (E4M3, E4M3))
    for draw in DRAWS[:2]:
        draw(a, b, torch.Generator("cuda").manual_seed(1))
        for dtype, add in FORMS:
            there = output(m, n, dtype)
            whole = fp8.product(a, b, there.clone(), add=add)
            for width in (m // 2, m // 8, 128):
                rows = slice(m - width, m)
                part = fp8.product(a.of_rows(m - width, width), b, there[rows].clone(), add=add)
                assert same_bits(part, whole[rows])
            for width in (n // 2, 128):
                columns = slice(n - width, n)
                part = fp8.product(a, b.of_rows(n - width, width), there[:, columns].clone(), add=add)
                assert same_bits(part, whole[:, columns])
    print(f"\n{kind}: {sum(fp8_cublas._is_exact.values())} of {len(fp8_cublas._is_exact)} kinds of product by cuBLAS")


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_that_a_capture_meets_first_is_that_of_fixed_tiles(kind):
    a, b = drawn(kind, 256, 256, 1024, (E4M3, E4M3))
    out, expected = torch.zeros(2, 256, 256, device="cuda")
    fp8_tiles.product(a, b, expected, False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp8.product(a, b, out)
    assert fp8_cublas._is_exact == {}
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(out, expected)


def test_fast_accumulation_has_other_bits():
    """The control: what stock's forward pass computes."""
    a, b = drawn("tensor", 256, 256, 4096, (E4M3, E4M3))
    result = fp8.product(a, b, torch.empty(256, 256, device="cuda"))
    fast = torch._scaled_mm(a.data, b.data.t(), a.scale, b.scale, out_dtype=FP32, use_fast_accum=True)
    assert (result != fast).float().mean() > 0.5
