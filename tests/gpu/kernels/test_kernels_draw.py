"""Draws of tokens on a GPU: the tokens of a CPU, for any number of rows and programs, and in a CUDA graph."""

import pytest
import torch

from tests.unit.portable import test_draw
from tp_invariant_recipes.kernels.digest import row_digest
from tp_invariant_recipes.portable.ieee.draw import draw

pytestmark = pytest.mark.gpu


def on_gpu(*inputs):
    return draw(*(tensor.cuda() for tensor in inputs)).cpu()


@pytest.mark.parametrize("kind", test_draw.KINDS)
@pytest.mark.parametrize("count, vocabulary", ((1, 151936), (64, 151936), (300, 5003), (16, 300)))
def test_a_gpu_draws_the_tokens_of_a_cpu(count, vocabulary, kind):
    inputs = test_draw.inputs(count, vocabulary, kind)
    scores, keys, numbers = inputs
    assert torch.equal(test_draw.limits_of(scores.cuda(), numbers.cuda()).cpu(), test_draw.limits_of(scores, numbers))
    tokens = draw(*inputs)
    assert torch.equal(on_gpu(*inputs), tokens)
    if count >= len(test_draw.SAMPLINGS) and kind != "sharp":  # the control: other keys
        assert not torch.equal(on_gpu(scores, keys + 1, numbers), tokens)
    assert torch.equal(row_digest(scores.cuda(), 0, vocabulary).cpu(), row_digest(scores, 0, vocabulary))


def test_a_cuda_graph_captures_a_draw():
    """And replays it with other keys and numbers, which it reads anew."""
    scores, keys, numbers = test_draw.inputs(16, 5003, "normal")
    there, row_keys = scores.cuda(), keys.cuda()
    columns = numbers.cuda()
    draw(there, row_keys, columns)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = draw(there, row_keys, columns)
        row_keys[:, 2] += 1
    for position in range(3):
        graph.replay()
        assert torch.equal(tokens.cpu(), draw(scores, test_draw.keys(16, 3 + position), numbers))
    columns.copy_(columns.flip(0))
    graph.replay()
    assert torch.equal(tokens.cpu(), draw(scores, test_draw.keys(16, 6), numbers.flip(0)))
