"""On one GPU: the exact gradient norm and the initial weights have the bits that they have on a CPU."""

import math

import pytest
import torch
from torch import Tensor

from tests.operands import same_bits
from tests.unit.numerics.sums.test_grad_norm import kernel_cases, spread_values
from tp_invariant_recipes.kernels import grad_norm as kernels
from tp_invariant_recipes.numerics.megatron import init
from tp_invariant_recipes.numerics.sums.grad_norm import exact_grad_norm

pytestmark = pytest.mark.gpu

CASES = range(len(kernel_cases()))


def on_gpu(grads: list[Tensor], offset: int = 0) -> list[Tensor]:
    """Copies on the GPU, `offset` elements from where the allocator would put them."""
    return [torch.empty(g.numel() + offset, device="cuda")[offset:].copy_(g.flatten()).view(g.shape) for g in grads]


@pytest.mark.parametrize("offset", (0, 1, 3))
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_have_the_bits_of_plain_torch_on_a_cpu(case, offset):
    grads = kernel_cases()[case]
    copies = on_gpu(grads, offset)
    largest = kernels.largest(copies)
    assert largest.is_cuda
    assert same_bits(largest.cpu(), kernels.largest(grads))
    assert same_bits(kernels.square_limbs(copies, largest).cpu(), kernels.square_limbs(grads, largest.cpu()))
    assert same_norm(exact_grad_norm(copies), exact_grad_norm(grads))


def same_norm(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_types_and_strides_have_the_norm_of_a_cpu(dtype):
    grads = [
        g.to(dtype) for g in (*spread_values(2, 70000, 8)[0].split(23333), spread_values(3, 5000, 0)[0].view(50, 100))
    ]
    copies = [g.cuda() for g in grads]
    assert exact_grad_norm(copies) == exact_grad_norm(grads)
    assert exact_grad_norm([g.t() if g.dim() == 2 else g[:] for g in copies]) == exact_grad_norm(grads)
    assert exact_grad_norm([*copies[::2], *grads[1::2]]) == exact_grad_norm(grads)  # some left on the CPU
    assert exact_grad_norm([copies[0].float(), *copies[1:]]) == exact_grad_norm(grads)


def test_other_values_in_the_same_memory():
    grad = torch.ones(kernels.CHUNK + 3, device="cuda")
    for value in (1.0, 3.0, 0.0, math.inf):
        grad.fill_(value)
        assert exact_grad_norm([grad]) == exact_grad_norm([grad.cpu()])


def test_limbs_carry_over_many_chunks():
    value, count = 2.0 - 2.0**-23, 1 << 28
    assert exact_grad_norm([torch.full((count,), value, device="cuda")]) == value * 2.0**14


PARTS = (
    ((5,), [[(1, 4)]]),
    ((1000, 333), [[(0, 1000)], [(0, 333)]]),
    ((1000, 333), [[(250, 500), (750, 1000)], [(7, 200)]]),
    ((64, 3, 1001), [[(0, 64)], [(1, 3)], [(3, 4), (500, 1001)]]),
    ((2, 600000), [[(0, 2)], [(1, 600000)]]),
)


def normal(shape, ranges, *, std, **options):
    return init.sample(shape, ranges, init._Normal(std), **options)


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("chunk", (1 << 24, 1000))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_initial_weights_have_the_bits_of_a_cpu(monkeypatch, part, chunk, dtype):
    monkeypatch.setattr(init, "CUDA_CHUNK", chunk if part[0][-1] < 1001 else 1 << 24)
    options = dict(seed=(1 << 63) + 5, name="decoder.layers.0.mlp.linear_fc1.weight", std=0.02, dtype=dtype)
    made = normal(*part, **options, device="cuda")
    assert made.is_cuda
    assert same_bits(made.cpu(), normal(*part, **options))


def test_quantiles_have_the_bits_of_a_cpu_from_end_to_end():
    last, near = (1 << 52) - 1, torch.arange(1 << 16)
    middle = torch.randint(0, last, (1 << 22,), generator=torch.Generator().manual_seed(0))
    bits = torch.cat((near, last - near, middle, near << 20, near << 36))[None]
    assert same_bits(init._ppnd16(bits.cuda()).cpu(), init._ppnd16(bits))
