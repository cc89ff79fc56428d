"""Gradients of experts over two data-parallel ranks: an owner of both ranks' tokens adds what Megatron adds."""

import pytest
import torch

from tests.distributed.ranks import on_ranks, same_bits
from tp_invariant_recipes.numerics.experts import add_second_sources

SMALLEST = 2.0**-149  # of fp32; a half of it is 0
SIZES = {"subnormal": SMALLEST, "ordinary": 1.0, "large": 2.0**127 * 1.5 / 2**10}


def _sources(size):
    """The gradients that the tokens of two data-parallel ranks give one expert."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(-(2**10), 2**10, (64, 4), generator=generator).float() * SIZES[size] for _ in range(2)]


def _reduced(mesh, size, ep):
    """What the optimizer gets for an expert's weight. ep=1: each rank has the gradient of its own tokens; ep=2: the
    first rank has both for its expert.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    from tp_invariant_recipes.host import cpu

    with cpu.installed():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
        config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, num_moe_experts=2, expert_model_parallel_size=ep
        )
        module = torch.nn.Linear(4, 64, bias=False)
        module.weight.allreduce = ep == 1  # as Megatron marks the weights of experts
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        model = DistributedDataParallel(config, settings, module)
        first, second = _sources(size)
        module.weight.main_grad.copy_(second if ep == 1 and mesh.rank else first)
        if ep == 2:
            module.weight.second_source = second.clone()
        factors = [bucket.gradient_scaling_factor for buffer in _buffers(model) for bucket in buffer.buckets]
        add_second_sources(DistributedDataParallel.finish_grad_sync)(model)
        assert factors == [bucket.gradient_scaling_factor for buffer in _buffers(model) for bucket in buffer.buckets]
        assert ep == 1 or not module.weight.second_source.count_nonzero()
        return module.weight.main_grad.clone()


def _buffers(model):
    return model.buffers + model.expert_parallel_buffers


@pytest.mark.parametrize("size", SIZES)
def test_both_layouts_scale_before_they_add(bridge, size):
    apart, together = (on_ranks(2, 2, _reduced, size, ep)[0] for ep in (1, 2))
    first, second = _sources(size)
    assert same_bits(apart, first / 2 + second / 2)
    assert same_bits(together, apart)


@pytest.mark.parametrize("size", ("subnormal", "large"))
def test_the_order_matters(size):
    """The control: for these numbers the half of the sum is not the sum of the halves."""
    first, second = _sources(size)
    assert not same_bits((first + second) / 2, first / 2 + second / 2)
