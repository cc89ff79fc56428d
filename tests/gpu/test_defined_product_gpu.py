"""What computes the defined product on a GPU: every bit of the recorded cases."""

import pytest
import torch

from tp_invariant_recipes.numerics import conformance
from tp_invariant_recipes.numerics.defined_product import WAYS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CASES = [case for case in conformance.read().cases if case.a.dtype == torch.bfloat16]


def whole(way, a, b):
    out = torch.empty(a.shape[0], b.shape[1], device="cuda")
    way.compute(a, b, out, False)
    return out


TILES = [way for way in WAYS if way.device == "cuda" and "tiles" in way.name]


@pytest.mark.parametrize("way", TILES, ids=lambda way: way.name)
def test_it_gives_what_is_recorded(way):
    recording = conformance.Recording("", tuple(CASES))
    assert conformance.differences(recording, lambda a, b: whole(way, a.cuda(), b.cuda())) == []


def test_cublas_gives_other_bits_where_it_splits_k():
    """The control, on an H200: the longest k, on rows and columns of the size that was recorded with tiles."""
    (cublas,) = [way for way in WAYS if way.name == "cuBLAS"]
    (tiles,) = [way for way in TILES if way.name == "fixed tiles"]
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(*size, generator=generator, device="cuda").bfloat16() for size in ((64, 32768), (32768, 64)))
    assert not torch.equal(whole(cublas, a, b), whole(tiles, a, b))
