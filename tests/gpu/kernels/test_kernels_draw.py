"""Draws of tokens on a GPU: the tokens of a CPU, for any number of rows and programs, and in a CUDA graph."""

import pytest
import torch

from tests.unit.portable import test_draw
from tp_invariant_recipes.features.rollouts.sampling import Parameters, draw
from tp_invariant_recipes.kernels.digest import row_digest
from tp_invariant_recipes.portable.ieee import draw as ieee

pytestmark = pytest.mark.gpu


def on_gpu(scores, keys, parameters):
    return draw(scores.cuda(), keys.cuda(), Parameters(*(column.cuda() for column in parameters))).cpu()


@pytest.mark.parametrize("kind", test_draw.KINDS)
@pytest.mark.parametrize("count, vocabulary", ((1, 151936), (64, 151936), (300, 5003), (16, 300)))
def test_a_gpu_draws_the_tokens_of_a_cpu(count, vocabulary, kind):
    inputs = test_draw.inputs(count, vocabulary, kind)
    scores, keys, (do_sample, temperature, top_k, top_p) = inputs
    numbers = scores, scores.amax(-1), do_sample, temperature, top_k, top_p
    assert torch.equal(ieee.kept(*(x.cuda() for x in numbers)).cpu(), ieee.kept(*numbers))
    tokens = draw(*inputs)
    assert torch.equal(on_gpu(*inputs), tokens)
    if count >= len(test_draw.SAMPLINGS) and kind != "sharp":  # the control: other keys
        assert not torch.equal(on_gpu(scores, keys + 1, inputs[2]), tokens)
    assert torch.equal(row_digest(scores.cuda(), 0, vocabulary).cpu(), row_digest(scores, 0, vocabulary))


def test_a_cuda_graph_captures_a_draw():
    """And replays it with other keys and parameters, which it reads anew."""
    scores, keys, parameters = test_draw.inputs(16, 5003, "normal")
    there, row_keys = scores.cuda(), keys.cuda()
    columns = Parameters(*(column.cuda() for column in parameters))
    draw(there, row_keys, columns)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = draw(there, row_keys, columns)
        row_keys[:, 2] += 1
    for position in range(3):
        graph.replay()
        assert torch.equal(tokens.cpu(), draw(scores, test_draw.keys(16, 3 + position), parameters))
    for column in columns:
        column.copy_(column.flip(0))
    graph.replay()
    flipped = Parameters(*(column.flip(0) for column in parameters))
    assert torch.equal(tokens.cpu(), draw(scores, test_draw.keys(16, 6), flipped))
