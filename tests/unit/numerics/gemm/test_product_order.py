"""The check that fixed tiles walk k in order sees every other order. On a CPU their twin stands for them."""

import pytest
import torch

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.kernels.gemm.fixed_tile_gemm import TILES, fixed_tile_gemm
from tp_invariant_recipes.numerics.gemm import gemm
from tp_invariant_recipes.numerics.tree_modes import TREE


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
