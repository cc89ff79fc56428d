# SPDX-License-Identifier: Apache-2.0
"""Kernels on one GPU: the bits of a CPU; and what a rank with all shards computes is what ranks with some compute.

The rows are in tests/kernel_table.py. What a CPU's controls show of a twin holds of its kernel, whose bits are equal.
"""

import math

import pytest
import torch

from tests import kernel_table
from tests.gpu.kernels.operands import normal_on_gpu
from tests.operands import same_bits
from tests.unit.portable import test_draw
from tp_invariant_recipes.kernels import causal_conv, digest, grad_norm, row_sums, tree_add
from tp_invariant_recipes.kernels.launch import TensorPart
from tp_invariant_recipes.numerics.sums.grad_norm import exact_grad_norm
from tp_invariant_recipes.portable.ieee import attention_triton as ieee_attention_triton
from tp_invariant_recipes.portable.ieee.draw import draw

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("settings_of_a_run")]
DTYPES = (torch.float32, torch.bfloat16)
DEGREES = (2, 4, 8)


@pytest.mark.parametrize("name", kernel_table.ON_GPU)
def test_the_bits_are_those_of_a_cpu(name):
    for function, *operands in kernel_table.ON_GPU[name](large=True):
        both = (function(*operands), function(*map(kernel_table.moved, operands)))
        for here, there in zip(*map(kernel_table.tensors_of, both), strict=True):
            assert same_bits(here, there), [getattr(value, "shape", value) for value in operands]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_are_parts_of_the_whole(dtype):
    for row in kernel_table.sliced(large=True, dtype=dtype, device="cuda"):
        row.check(DEGREES)


@pytest.mark.parametrize("at_once", (False, True))
def test_a_rank_adds_its_rows_alone(at_once):
    """Leaving out the numbers of other ranks."""
    rows, at = normal_on_gpu(4096, 1024), torch.randint(512, (4096,), device="cuda")
    whole = kernel_table.added(rows, at, torch.zeros(512, 1024, device="cuda"), at_once)
    for degree in DEGREES:
        size, parts = 512 // degree, []
        for first in range(0, 512, size):
            mine = (at - first).masked_fill((at < first) | (at >= first + size), -1)
            parts.append(kernel_table.added(rows, mine, torch.zeros(size, 1024, device="cuda"), at_once))
        assert same_bits(torch.cat(parts), whole)


def test_a_later_launch_has_the_bits_of_the_first():
    """Through the C function of Triton's launcher: again, on another stream, in a CUDA graph, and where 16 bytes do not
    begin, which Triton compiles anew."""
    memory, out = normal_on_gpu(8 * 4096 + 1), torch.empty(4096, device="cuda")
    partials = memory[:-1].view(8, 4096)
    expected = tree_add.tree_add(partials.cpu(), torch.empty(4096))
    for _ in range(2):
        assert same_bits(tree_add.tree_add(partials, out.zero_()).cpu(), expected)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tree_add.tree_add(partials, out.zero_())
    stream.synchronize()
    assert same_bits(out.cpu(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree_add.tree_add(partials, out)
    out.zero_()
    assert not same_bits(out.cpu(), expected)  # nothing ran while it was captured
    graph.replay()
    assert same_bits(out.cpu(), expected)
    shifted = memory[1:].view(8, 4096)
    assert same_bits(tree_add.tree_add(shifted, out).cpu(), tree_add.tree_add(shifted.cpu(), torch.empty(4096)))


# --- sizes beyond a grid's, or beyond 2^31 ---


@pytest.mark.parametrize("rows", (70_000, 300_000))
def test_kernels_take_long_sequences(rows):
    """More rows than CUDA starts programs along y; the bits of the twins on a CPU."""
    table = torch.zeros(70, 40, device="cuda")
    values, at = normal_on_gpu(rows, 40, dtype=torch.bfloat16), torch.arange(rows, device="cuda") % 70
    row_sums.add_rows(values, at, table)
    twin = torch.zeros(70, 40)
    row_sums.add_rows(values.cpu(), at.cpu(), twin)
    assert same_bits(table.cpu(), twin)
    places = torch.stack([torch.arange(rows, device="cuda"), torch.arange(rows, device="cuda").flip(0)], 1)
    assert same_bits(row_sums.row_sum(values, places).cpu(), row_sums.row_sum(values.cpu(), places.cpu()))
    numbers = normal_on_gpu(rows, 64)
    sums = tree_add.tree_add(numbers, torch.empty(rows, device="cuda"), groups=rows)
    assert same_bits(sums.cpu(), tree_add.tree_add(numbers.cpu(), torch.empty(rows), groups=rows))


def test_a_convolution_takes_long_sequences():
    """The last rows as in a sequence of their own."""
    x, weight, bias = normal_on_gpu(1, 1_100_000, 40), normal_on_gpu(1, 40, 4), normal_on_gpu(1, 40)
    whole = causal_conv.causal_conv_forward(x, weight, bias, 1)
    alone = causal_conv.causal_conv_forward(x[:, -1000:].contiguous(), weight, bias, 1)
    assert same_bits(whole[:, -990:].contiguous(), alone[:, -990:].contiguous())
    dx, _ = causal_conv.causal_conv_backward(x, x, weight, bias, 1)
    part = x[:, -1008:].contiguous()
    last, _ = causal_conv.causal_conv_backward(part, part, weight, bias, 1)
    assert same_bits(dx[:, -990:].contiguous(), last[:, -990:].contiguous())


def test_heads_of_a_group_are_added_beyond_2_31_numbers():
    heads, positions, width = 5, 2**22, 128  # the last head begins at number 2^31; 10.7 GB
    of_heads = torch.zeros(heads, positions, width, device="cuda")
    of_heads[-1] = 1.0
    sums = torch.empty(positions, 1, 1, width, dtype=torch.bfloat16, device="cuda")
    constants = (heads, 1, width, ieee_attention_triton.BLOCK)
    grid = positions * width // ieee_attention_triton.BLOCK, 1
    ieee_attention_triton.SUM_OF_HEADS.launch(grid, (of_heads, of_heads, sums, sums), (positions, 1, 1.0), constants)
    assert bool((sums == 1.0).all())


def test_limbs_of_a_norm_carry_over_many_chunks():
    value, count = 2.0 - 2.0**-23, 1 << 28
    assert exact_grad_norm([torch.full((count,), value, device="cuda")]) == value * 2.0**14


# --- memory that is read anew ---


def test_a_norm_and_digests_read_their_memory_anew():
    grad = torch.ones(grad_norm.CHUNK + 3, device="cuda")
    for value in (1.0, 3.0, 0.0, math.inf):
        grad.fill_(value)
        assert exact_grad_norm([grad]) == exact_grad_norm([grad.cpu()])
    values = [normal_on_gpu(65, 1030, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    taken = digest.Lanes([TensorPart(value, 0, 0) for value in values])
    first = taken()
    assert torch.equal(first, taken())
    values[1][64, 1029] = -values[1][64, 1029]
    assert (first != taken()).all(1).tolist() == [False, True, False]


def test_a_rank_without_pieces_has_its_lanes_on_the_gpu():
    taken = digest.Lanes([], magnitude=True, device=torch.device("cuda"))
    assert taken().shape == (0, 2)
    assert taken().is_cuda
    assert (taken.largest.is_cuda, taken.largest.item(), taken.unlike.is_cuda) == (True, 0, True)


def test_a_cuda_graph_captures_a_draw():
    """And replays it with other keys and numbers, which it reads anew."""
    scores, keys, numbers = test_draw.inputs(16, 5003, "normal")
    there, row_keys, columns = scores.cuda(), keys.cuda(), numbers.cuda()
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
