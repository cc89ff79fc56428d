"""The embedding's weight gradient: one order of additions for every degree, in fp32, beside a tied output layer's."""

import pytest
import torch

from tests.distributed.numerics.module_runs import DTYPES, joined
from tests.distributed.ranks import megatron, on_ranks
from tests.operands import same_bits
from tp_invariant_recipes.numerics.megatron import replacements
from tp_invariant_recipes.numerics.settings import NumericsSettings
from tp_invariant_recipes.replacement import applied

NUMERICS = NumericsSettings(virtual_shards=4)
SHARDS, DEGREES = 4, (1, 4)
VOCABULARY, HIDDEN, SEQUENCE, BATCH, MICRO_BATCHES = 16, 24, 32, 2, 3


def _config(size, dtype, sequence_parallel):
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, params_dtype=dtype, bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=size, sequence_parallel=sequence_parallel,
    )  # fmt: skip


def _batch(n, dtype):
    """ids [b, s], of which every row has many, one more than all others; a gradient [b, s, h]."""
    generator = torch.Generator().manual_seed(n)
    ids = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    ids[:, ::3] = 5
    return ids, torch.randn(BATCH, SEQUENCE, HIDDEN, generator=generator).to(dtype)


def _gradient(mesh, invariant, dtype, sequence_parallel, tied):
    """This rank's rows of the weight gradient of MICRO_BATCHES micro-batches, in Megatron's buffer; with a tied weight
    every micro-batch also adds one to the buffer, as an output layer would.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

    from tp_invariant_recipes.numerics.megatron.local import InvariantVocabParallelEmbedding
    from tp_invariant_recipes.numerics.sums.weight_gradient import added_to_main_grad

    kind = InvariantVocabParallelEmbedding if invariant else VocabParallelEmbedding
    config = _config(mesh.size, dtype, sequence_parallel)
    embedding = kind(
        VOCABULARY, HIDDEN, init_method=torch.nn.init.ones_, reduce_scatter_embeddings=sequence_parallel, config=config
    )
    embedding.weight.zero_out_wgrad = tied
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), embedding)
    for n in range(MICRO_BATCHES):
        ids, dy = _batch(n, dtype)
        dy = dy.transpose(0, 1).chunk(mesh.size)[mesh.rank] if sequence_parallel else dy
        y = model(ids)
        if tied:
            y = _Output.apply(y, embedding.weight, added_to_main_grad)
        y.backward(dy)
    model.finish_grad_sync()
    return embedding.weight.main_grad.clone()


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, weight, added):
        ctx.save_for_backward(weight)
        ctx.added = added
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        (weight,) = ctx.saved_tensors
        weight.main_grad += 2.0**-9  # which takes the last bits of a sum of lookups that it is added to in turns
        return dy, ctx.added(weight), None


CASES = [(dtype, tied) for dtype in DTYPES for tied in (False, True)]


def _all(mesh):
    with megatron(mesh), applied(replacements.replacements(NUMERICS)):
        return {
            (invariant, sequence_parallel, *case): _gradient(mesh, invariant, case[0], sequence_parallel, case[1])
            for invariant in (True, False)
            for sequence_parallel in ((False, True) if mesh.size > 1 else (False,))
            for case in CASES
        }


@pytest.fixture(scope="module")
def results(bridge):
    """degree → what `_all` found, whole."""
    results = {}
    for size in DEGREES:
        ranks = on_ranks(size, SHARDS, _all)
        results[size] = {case: joined([rank[case] for rank in ranks], 0) for case in ranks[0]}
    return results


def _by_definition(dtype, tied):
    lookups, output = torch.zeros(VOCABULARY, HIDDEN), torch.zeros(VOCABULARY, HIDDEN)
    for n in range(MICRO_BATCHES):
        ids, dy = _batch(n, dtype)
        for row, gradient in zip(ids.flatten().tolist(), dy.flatten(0, 1), strict=True):
            lookups[row] += gradient.float()
        output += 2.0**-9 * tied
    return lookups + output


@pytest.mark.parametrize("size, sequence_parallel", ((1, False), (4, False), (4, True)))
@pytest.mark.parametrize("dtype, tied", CASES)
def test_the_gradient_is_that_of_the_definition_and_megatrons_is_not(results, size, sequence_parallel, dtype, tied):
    """Megatron adds a micro-batch in the weight's dtype first, and micro-batches in turns with the output layer."""
    expected = _by_definition(dtype, tied)
    assert same_bits(results[size][True, sequence_parallel, dtype, tied], expected)
    stock = results[size][False, sequence_parallel, dtype, tied]
    assert not same_bits(stock, expected)
    error = (stock - expected).norm() / expected.norm()
    assert error < 1e-6 if dtype == torch.float32 else 1e-4 < error < 1e-1
