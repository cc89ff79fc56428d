"""Kernels on one GPU: what a rank with all shards computes is what ranks with some of them compute, bit for bit."""

import pytest
import torch

from tests import kernel_table
from tests.gpu.kernels.operands import normal_on_gpu
from tests.operands import same_bits
from tp_invariant_recipes.kernels import causal_conv, row_add, row_sum, tree_add
from tp_invariant_recipes.kernels.products.grouped_product import Groups
from tp_invariant_recipes.numerics.products import defined
from tp_invariant_recipes.numerics.products.product import product
from tp_invariant_recipes.portable.ieee import attention_triton as ieee_attention_triton

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("settings_of_a_run")]
DTYPES = (torch.float32, torch.bfloat16)
DEGREES = (2, 4, 8)


def _moved(value):
    if isinstance(value, Groups):
        return Groups(value.sizes, value.counts.cuda())
    return value.cuda() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", kernel_table.TWINS)
def test_the_bits_are_those_of_a_cpu(name):
    for function, *operands in kernel_table.TWINS[name](large=True):
        here, there = function(*operands), function(*map(_moved, operands))
        for first, other in zip(*(item if isinstance(item, tuple) else (item,) for item in (here, there)), strict=True):
            assert same_bits(first, other.cpu()), [getattr(value, "shape", value) for value in operands]


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


# [tokens, k, n] of one shard of Qwen3-0.6B and 8B, V = 8 and 4.
SHAPES = (
    (2048, 1024, 384), (2048, 4096, 1536), (2048, 1536, 4096), (2048, 512, 4096), (2048, 4096, 768),
    (8192, 4096, 3072),
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_trial_takes_cublas(monkeypatch, dtype):
    """For shards of a model, without gaps and not added to anything: a trial that always refuses fails here."""
    monkeypatch.setattr(defined, "_cublas_is_exact", {})
    for tokens, k, n in SHAPES:
        x, w = normal_on_gpu(tokens, k, dtype=dtype), normal_on_gpu(n, k, dtype=dtype)
        for out in (torch.empty(tokens, n, dtype=dtype, device="cuda"), torch.empty(tokens, n, device="cuda")):
            product(x, w.t(), out)
    decided = dict(defined._cublas_is_exact)
    print(sum(decided.values()), "of", len(decided), "kinds of product by cuBLAS")
    assert len(decided) == len(SHAPES) * (1 if dtype == torch.float32 else 2)
    assert any(decided.values())
    assert dtype == torch.float32 or all(decided.values())


@pytest.mark.parametrize("rows", (70_000, 300_000))
def test_kernels_take_long_sequences(rows):
    """More rows than CUDA starts programs along y; the bits of the twins on a CPU."""
    table = torch.zeros(70, 40, device="cuda")
    values, at = normal_on_gpu(rows, 40, dtype=torch.bfloat16), torch.arange(rows, device="cuda") % 70
    row_add.add_rows(values, at, table)
    twin = torch.zeros(70, 40)
    row_add.add_rows(values.cpu(), at.cpu(), twin)
    assert same_bits(table.cpu(), twin)
    places = torch.stack([torch.arange(rows, device="cuda"), torch.arange(rows, device="cuda").flip(0)], 1)
    assert same_bits(row_sum.row_sum(values, places).cpu(), row_sum.row_sum(values.cpu(), places.cpu()))
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
