"""Gradients of experts over data-parallel ranks: an owner of several ranks' tokens adds them as the ranks would."""

import pytest
import torch

from tests.distributed.ranks import on_ranks
from tests.operands import same_bits
from tp_invariant_recipes.numerics.megatron import replacements
from tp_invariant_recipes.numerics.settings import NumericsSettings
from tp_invariant_recipes.numerics.sums.weight_gradient import gradients_of
from tp_invariant_recipes.replacement import applied

NUMERICS = NumericsSettings(virtual_shards=1)
SMALLEST = 2.0**-149  # of fp32; a half of it is 0
SIZES = {"subnormal": SMALLEST, "ordinary": 1.0, "large": 2.0**127 * 1.5 / 2**10}


def _sources(size, ranks):
    """The gradients that the tokens of the data-parallel ranks give one expert."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randint(-(2**10), 2**10, (64, 4), generator=generator).float() for _ in range(ranks)]
    # Sums of several ordinary ones are rounded.
    return [(x * (1 + 3.0 ** -(n + 1)) if size == "ordinary" else x) * SIZES[size] for n, x in enumerate(whole)]


def _reduced(mesh, ep):
    """Size -> what the optimizer gets for an expert's weight.

    ep=1: each rank has the gradient of its own tokens; else a rank has those of ep ranks.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    from tp_invariant_recipes.cpu_host import cpu

    with cpu.installed(), applied(replacements.replacements(NUMERICS)):
        parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
        config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, num_moe_experts=mesh.size,
            expert_model_parallel_size=ep,
        )  # fmt: skip
        config.expert_groups = mesh.size  # a buffer for each rank's tokens
        return {size: _of_size(size, mesh, ep, config) for size in SIZES}


def _of_size(size, mesh, ep, config):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    module = torch.nn.Linear(4, 64, bias=False)
    module.weight.allreduce = ep == 1  # as Megatron marks the weights of experts
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module)
    sources = _sources(size, mesh.size)
    first = mesh.rank // ep * ep
    mine = sources[first : first + ep] if ep > 1 else [sources[mesh.rank]]
    for buffer, source in zip(gradients_of(module.weight), mine, strict=True):
        buffer.copy_(source)
    model.finish_grad_sync()
    result = module.weight.main_grad.clone()
    model.zero_grad_buffer()
    assert not any(buffer.count_nonzero() for buffer in gradients_of(module.weight))
    return result


def test_every_layout_scales_before_it_adds_and_adds_by_one_tree(bridge):
    ranks = 4
    separate, *grouped = (on_ranks(ranks, ranks, _reduced, ep)[0] for ep in (1, 2, 4))
    for size in SIZES:
        sums = [source / ranks for source in _sources(size, ranks)]
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
        assert same_bits(separate[size], sums[0]), size
        assert all(same_bits(other[size], separate[size]) for other in grouped), size


@pytest.mark.parametrize("size", ("subnormal", "large"))
def test_the_order_matters(size):
    """The control: for these numbers the half of the sum is not the sum of the halves."""
    first, second = _sources(size, 2)
    assert not same_bits((first + second) / 2, first / 2 + second / 2)


def test_the_tree_matters():
    a, b, c, d = (source / 4 for source in _sources("ordinary", 4))
    assert not same_bits((a + b) + (c + d), ((a + b) + c) + d)
