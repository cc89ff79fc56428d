"""The last bit moved at random."""

import pytest
import torch
from torch import nn

from tp_invariant_recipes.numerics.gemm.cublas import tried, trying
from tp_invariant_recipes.observe.dithering import Dither, dithered


@pytest.mark.parametrize("dtype, integers", ((torch.bfloat16, torch.int16), (torch.float32, torch.int32)))
def test_every_number_moves_by_one_ulp_and_what_is_none_stays(dtype, integers):
    x = torch.randn(4096).to(dtype)
    special = torch.tensor([0.0, -0.0, float("inf"), float("nan"), torch.finfo(dtype).max]).to(dtype)
    moved = dithered(torch.cat([x, special]), torch.Generator().manual_seed(1))
    steps = moved[:4096].view(integers) - x.view(integers)
    assert set(steps.tolist()) == {-1, 1}
    assert abs(steps.float().mean()) < 0.1
    assert torch.equal(moved[4096:-1].view(integers), special[:-1].view(integers))
    assert torch.isfinite(moved[-1])


def test_outputs_and_gradients_of_modules_move_until_the_hooks_are_off():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.randn(4, 8)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        out = model(x)
        out.square().sum().backward()
        return out.detach(), model[0].weight.grad.clone()

    plain = run()
    dither = Dither([model], seed=3)
    moved = run()
    dither.unhook()
    assert all(torch.equal(a, b) for a, b in zip(plain, run(), strict=True))
    for a, b in zip(plain, moved, strict=True):
        assert not torch.equal(a, b)
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_what_a_trial_calls_does_not_move():
    """Attention is tried on a layer of the model; Muon changes a setting, so that a later pass tries it once more."""
    model, x = nn.Linear(8, 8), torch.ones(4, 8)
    plain = model(x)
    dither = Dither([model], seed=3)
    assert tried({}, ("kind",), x, lambda: torch.equal(model(x), plain))
    assert not torch.equal(model(x), plain)
    with pytest.raises(ZeroDivisionError):
        tried({}, ("kind",), x, lambda: 1 // 0)
    assert not trying()
    dither.unhook()
