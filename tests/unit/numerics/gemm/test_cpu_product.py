# SPDX-License-Identifier: Apache-2.0
"""Products of shards on a CPU: whatever is multiplied in one call, a shard has the bits that it has alone. The check
that fixed tiles walk k in order sees every other order. On a CPU their twin stands for them.
"""

import pytest
import torch

from tests.operands import normal, same_bits
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.kernels.gemm.fixed_tile_gemm import TILES, fixed_tile_gemm
from tp_invariant_recipes.numerics.gemm import cpu, gemm
from tp_invariant_recipes.numerics.tree_modes import TREE

SHARDS = 8
# Shapes of qwen3_toy's layers, then odd ones: single rows and columns, and what fills no vector.
LAYERS = ((128, 128, 48), (128, 16, 128), (128, 64, 128), (512, 16, 128), (128, 128, 64), (48, 128, 128))
SHAPES = (
    *LAYERS[:2], *(pytest.param(*shape, marks=pytest.mark.release) for shape in LAYERS[2:]),
    (1, 40, 37), (3, 37, 5), (33, 100, 17), (8, 500, 1), (200, 70, 1), (1, 70, 200), (40, 1, 9), (100, 2, 3),
    (2, 500, 31),
)  # fmt: skip
COUNTS = (1, 2, 8)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(cpu, "_batched_is_exact", {})


def _alone(a, b):
    """By definition: one product, on operands without gaps."""
    return torch.mm(cpu.without_gaps(a.float()), cpu.without_gaps(b.float()))


def operand(*shape, dtype=torch.float32, seed=0, transposed=False):
    values = normal(*shape, seed=seed)
    return (values.transpose(-1, -2).contiguous().transpose(-1, -2) if transposed else values).to(dtype)


@pytest.mark.parametrize("m, k, n", SHAPES)
def test_a_shard_of_columns_has_the_bits_it_has_alone(m, k, n):
    a, b = operand(m, k), operand(k, SHARDS * n, seed=1, transposed=True)
    for shards in COUNTS:
        part = b[:, : shards * n]
        expected = torch.cat([_alone(a, y) for y in part.chunk(shards, 1)], 1)
        assert same_bits(cpu.gemm(a, part, 1, shards), expected), shards


@pytest.mark.parametrize("m, k, n", SHAPES)
def test_a_shard_of_rows_has_the_bits_it_has_alone(m, k, n):
    a, b = operand(SHARDS * m, k, transposed=True), operand(k, n, seed=1)
    for shards in COUNTS:
        part = a[: shards * m]
        expected = torch.cat([_alone(x, b) for x in part.chunk(shards)])
        assert same_bits(cpu.gemm(part, b, shards, 1), expected), shards


@pytest.mark.parametrize("segments", (1, 2))
@pytest.mark.parametrize("m, k, n", SHAPES)
def test_a_shard_of_what_is_summed_has_the_bits_it_has_alone(m, k, n, segments):
    for shards in COUNTS:
        size = shards * k
        a = operand(m, segments * size)
        b = operand(segments * size, n, seed=1, transposed=True)
        expected = []
        for shard in range(shards):
            starts = [segment * size + shard * k for segment in range(segments)]
            first, *more = (_alone(a[:, at : at + k], b[at : at + k]) for at in starts)
            expected.append(first + more[0] if more else first)
        if segments == 1 < shards:
            expected = neighbours(expected)
        assert same_bits(cpu.partials(a, b, shards, (size,) * segments), torch.stack(expected)), shards


def neighbours(terms):
    return [x + y for x, y in zip(terms[::2], terms[1::2], strict=True)]


@pytest.mark.parametrize("m, k, n", SHAPES)
def test_a_product_added_in_one_call_has_the_bits_of_an_addition(m, k, n):
    a, b, before = operand(SHARDS * m, k, transposed=True), operand(k, n, seed=1), operand(SHARDS * m, n, seed=2)
    expected = before + torch.cat([_alone(x, b) for x in a.chunk(SHARDS)])
    assert cpu.gemm(a, b, SHARDS, 1, before) is before
    assert same_bits(before, expected)


def test_bf16_is_multiplied_in_fp32():
    a, b = operand(128, 128, dtype=torch.bfloat16), operand(128, 384, dtype=torch.bfloat16, transposed=True)
    expected = torch.cat([_alone(a, y) for y in b.chunk(SHARDS, 1)], 1)
    assert same_bits(cpu.gemm(a, b, 1, SHARDS), expected)
    expected = [_alone(x, y) for x, y in zip(a.chunk(SHARDS, 1), b.chunk(SHARDS), strict=True)]
    assert same_bits(cpu.partials(a, b, SHARDS, (128,)), torch.stack(neighbours(expected)))


def _in_order(a, b):
    """A product whose every number is summed from the first to the last, whatever the shapes and the processor."""
    total = torch.zeros(*a.shape[:-1], b.shape[-1])
    for n in range(a.shape[-1]):
        total = total + a[..., n, None] * b[..., n, None, :]
    return total


def _by_size(a, b):
    """One that sums from the last number where the right operand is large, as a library may choose by the shape."""
    return _in_order(a, b) if b.numel() < 10_000 else _in_order(a.flip(-1), b.flip(-2))


@pytest.mark.parametrize(
    "library, in_single_call", ((_in_order, True), (_by_size, False)), ids=("of one order", "of two")
)
def test_layers_are_multiplied_in_one_call_where_a_library_keeps_the_bits(monkeypatch, library, in_single_call):
    """Else this would be right and as slow as before. Which of these a library is depends on the processor."""
    shapes = []

    def counted(a, b):
        shapes.append((a.shape, b.shape))
        return library(a, b)

    counted.__name__ = "counted"
    monkeypatch.setattr(torch, "mm", counted)
    monkeypatch.setattr(torch, "bmm", counted)
    monkeypatch.setattr(torch, "baddbmm", lambda onto, a, b, out: out.copy_(onto + counted(a, b)))
    a, b = operand(16, 128, dtype=torch.bfloat16), operand(128, 384, dtype=torch.bfloat16, transposed=True)
    of_columns = [_in_order(a.float(), y.float()) for y in b.chunk(SHARDS, 1)]
    of_k = [_in_order(x.float(), y.float()) for x, y in zip(a.chunk(SHARDS, 1), b.chunk(SHARDS), strict=True)]
    for call, expected, calls in (
        (lambda: cpu.gemm(a, b, 1, SHARDS), torch.cat(of_columns, 1), 1),
        (lambda: cpu.partials(a, b, SHARDS, (128,)), torch.stack(neighbours(of_k)), 2),
    ):
        call()  # tries
        shapes.clear()
        assert same_bits(call(), expected)
        assert len(shapes) == (calls if in_single_call else SHARDS)
    assert list(cpu._batched_is_exact.values()) == [in_single_call] * 2


def _in_another_order(a, b):
    return torch.mm(a.flip(-1), b.flip(-2))


def _without_the_sign_of_zero(a, b):
    result = torch.mm(a, b)
    return result.masked_fill(result == 0.0, -0.0)


def _flushing(a, b):
    result = torch.mm(a, b)
    return result.masked_fill(result.abs() < 2.0**-126, 0.0)


def _rounding_in_bf16(a, b):
    return torch.mm(a.bfloat16(), b.bfloat16()).float()


@pytest.mark.parametrize(
    "other", (_in_another_order, _without_the_sign_of_zero, _flushing, _rounding_in_bf16), ids=lambda f: f.__name__
)
@pytest.mark.parametrize("m, k, n", ((16, 3, 16), (16, 16, 16), (128, 128, 384)))
def test_what_has_other_bits_is_seen(m, k, n, other):
    a, b = operand(m, k), operand(k, n)
    assert cpu.is_exact(torch.mm, torch.mm, a, b)
    assert not cpu.is_exact(other, torch.mm, a, b)


def test_a_library_that_starts_at_what_is_added_to_is_seen(monkeypatch):
    def onto_first(onto, a, b, out=None):
        total = onto.clone()
        for n in range(a.shape[1]):
            total += a[:, n, None] * b[n, None]
        return total if out is None else out.copy_(total)

    monkeypatch.setattr(torch, "addmm", onto_first)
    a, b, before = operand(64, 32), operand(32, 64, seed=1), operand(64, 64, seed=2)
    expected = before + _alone(a, b)
    assert same_bits(cpu.gemm(a, b, 1, 1, before), expected)
    assert list(cpu._batched_is_exact.values()) == [False]


def test_small_products_are_not_tried():
    a, b = operand(5, 40), operand(40, 8)
    cpu.gemm(a, b, 1, 8)
    assert list(cpu._batched_is_exact.values()) == [False]


def test_what_was_seen_holds_for_that_alignment_only():
    memory = torch.randn(1 + 128 * 64)
    b = operand(64, 64)
    for start in (0, 1):
        cpu.gemm(memory[start : start + 128 * 64].view(128, 64), b, 8, 1)
    assert len(cpu._batched_is_exact) == 2


def backwards(k, tile):
    return range(k - 1, -1, -1)


def two_steps_swapped(k, tile):
    """The second and the third quarter of every tile."""
    step = tile // gemm.PLACES
    swapped = (0, 2, 1, 3)
    return [start + swapped[i // step] * step + i % step for start in range(0, k, tile) for i in range(tile)]


def tiles_swapped(k, tile):
    return [*range(tile, k), *range(tile)]


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    """Not what an earlier test has found."""
    monkeypatch.setattr(gemm, "require_order", gemm.require_order.__wrapped__)


def test_tiles_that_walk_k_in_order_pass():
    gemm.require_order("cpu")


@pytest.mark.parametrize("dtype", TILES, ids=str)
@pytest.mark.parametrize("other", (backwards, two_steps_swapped, tiles_swapped), ids=lambda f: f.__name__)
def test_another_order_is_refused_by_name(monkeypatch, other, dtype):
    def reordered(a, b, out):
        if a.dtype == dtype:
            k = list(other(a.shape[1], TILES[dtype]["TILE_K"]))
            a, b = a[:, k], b[k]
        return fixed_tile_gemm(a, b, out)

    monkeypatch.setattr(gemm, "fixed_tile_gemm", reordered)
    with pytest.raises(RunError, match=rf"fixed tiles of {dtype} do not add in the order of k on cpu.*Triton"):
        gemm.require_order("cpu")


def test_a_sum_in_two_parts_is_refused(monkeypatch):
    def split(a, b, out):
        half = a.shape[1] // 2
        first, second = torch.empty_like(out), torch.empty_like(out)
        fixed_tile_gemm(a[:, :half], b[:half], first)
        fixed_tile_gemm(a[:, half:], b[half:], second)
        return out.copy_(first + second)

    monkeypatch.setattr(gemm, "fixed_tile_gemm", split)
    with pytest.raises(RunError):
        gemm.require_order("cpu")


def test_tree_asks_on_a_gpu_only(monkeypatch):
    asked = []
    monkeypatch.setattr(gemm, "require_order", asked.append)
    TREE.require_machine(None)
    TREE.require_machine(1)
    assert asked == ["cuda:1"]
