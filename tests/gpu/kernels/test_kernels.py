"""Kernels on one GPU: what a rank with all shards computes is what ranks with some of them compute, bit for bit."""

import pytest
import torch

from tests.gpu.kernels.operands import normal_on_gpu
from tests.operands import same_bits
from tp_invariant_recipes.kernels import causal_conv, cross_entropy, rms_norm, row_add, row_sum, token_sum, tree_add
from tp_invariant_recipes.numerics.products import defined
from tp_invariant_recipes.numerics.products.product import product
from tp_invariant_recipes.portable.ieee import attention_triton as ieee_attention_triton

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("settings_of_a_run")]
DTYPES = (torch.float32, torch.bfloat16)
SHARDS = 8
DEGREES = (2, 4, 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", (1, 2, 4, 8, 16, 32, 64, 128))
def test_tree_add_has_the_bits_of_its_twin(width, dtype):
    for size in (5001, 4096):
        partials, out = normal_on_gpu(3, width, size), torch.empty(3, size, dtype=dtype)
        on_gpu = tree_add.tree_add(partials, out.cuda(), groups=3)
        assert same_bits(on_gpu.cpu(), tree_add.tree_add(partials.cpu(), out, groups=3))


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens, heads, width", ((256, 1, 1024), (2048, 1, 4096), (512, 32, 128), (96, 8, 24)))
@pytest.mark.parametrize("by_heads", (False, True))
def test_norm_of_a_slice_is_the_slice_of_the_norm(dtype, tokens, heads, width, by_heads):
    if by_heads and heads == 1:
        pytest.skip("one head is not divided")
    # As Megatron's keys are: heads with gaps between them.
    x = normal_on_gpu(tokens, heads, 2 * width, dtype=dtype)[..., :width]
    dy, weight = normal_on_gpu(tokens, heads, width, dtype=dtype), normal_on_gpu(width, dtype=dtype)
    y, scale = rms_norm.rms_norm_forward(x, weight, 1e-6)
    dx, leaves = rms_norm.rms_norm_backward(dy, x, weight, scale, SHARDS, by_heads)
    dim = 1 if by_heads else 0
    for degree in DEGREES:
        parts = []
        for rank in range(degree):
            mine = [t.chunk(degree, dim)[rank] for t in (x, dy)]
            if rank % 2:
                mine = [t.contiguous() for t in mine]
            part, s = rms_norm.rms_norm_forward(mine[0], weight, 1e-6)
            parts.append((part, *rms_norm.rms_norm_backward(mine[1], mine[0], weight, s, SHARDS // degree, by_heads)))
        for whole, pieces, along in zip((y, dx, leaves), zip(*parts, strict=True), (dim, dim, 0), strict=True):
            assert same_bits(whole, torch.cat(pieces, along))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_is_correct(dtype):
    x, dy, weight = (
        normal_on_gpu(256, 1, 1000, dtype=dtype),
        normal_on_gpu(256, 1, 1000, dtype=dtype),
        normal_on_gpu(1000, dtype=dtype),
    )
    y, scale = rms_norm.rms_norm_forward(x, weight, 1e-6)
    dx, leaves = rms_norm.rms_norm_backward(dy, x, weight, scale, 4, False)
    x64, w64 = (t.double().requires_grad_() for t in (x, weight))
    y64 = torch.nn.functional.rms_norm(x64, (1000,), w64, 1e-6)
    y64.backward(dy.double())
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(y.double(), y64, **near)
    torch.testing.assert_close(dx.double(), x64.grad, **near)
    torch.testing.assert_close(leaves.double().sum((0, 1)), w64.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropy_of_a_slice_is_the_slice_of_it(dtype):
    rows, size = 64, 8 * 19000
    logits, gradient = normal_on_gpu(rows, size, dtype=dtype), normal_on_gpu(rows)
    target = torch.randint(size, (rows,), device="cuda")
    highest = logits.amax(-1).float()
    partials = cross_entropy.sum_of_exponentials(logits, highest, SHARDS)
    total = partials.sum(0)
    dlogits = cross_entropy.softmax_gradient(logits, target, highest, total, gradient, SHARDS)
    reference = logits.double().requires_grad_()
    torch.nn.functional.cross_entropy(reference, target, reduction="none").backward(gradient.double())
    torch.testing.assert_close(dlogits.double(), reference.grad, rtol=1e-2, atol=1e-5)
    for degree in DEGREES:
        slices = [part.contiguous() for part in logits.chunk(degree, 1)]
        sums = [cross_entropy.sum_of_exponentials(part, highest, SHARDS // degree) for part in slices]
        assert same_bits(partials, torch.cat(sums))
        gradients = [
            cross_entropy.softmax_gradient(part, target - n * part.shape[1], highest, total, gradient, SHARDS // degree)
            for n, part in enumerate(slices)
        ]
        assert same_bits(dlogits, torch.cat(gradients, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_sum_of_a_slice_is_the_slice_of_it(dtype):
    values = normal_on_gpu(256, 1600, dtype=dtype)
    whole = token_sum.token_sum(values, 1)
    torch.testing.assert_close(whole.double().sum((0, 1)), values.double().sum(0), rtol=1e-4, atol=1e-4)
    for degree in DEGREES:
        assert same_bits(whole, torch.cat([token_sum.token_sum(v, 1) for v in values.chunk(degree, 1)], 2))
    chunks = token_sum.token_sum(values, SHARDS)
    for degree in DEGREES:
        parts = [token_sum.token_sum(v, SHARDS // degree) for v in values.chunk(degree)]
        assert same_bits(chunks, torch.cat(parts))


@pytest.mark.parametrize("at_once", (False, True))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "tokens, table, features", ((4096, 512, 1024), (8192, 151936, 1024), (300, 8, 40), (513, 64, 5000))
)
def test_added_rows_have_the_bits_of_the_cpu_and_of_slices(tokens, table, features, dtype, at_once):
    """Two micro-batches; a third of the tokens are one number. A rank leaves out the numbers of other ranks."""
    whole = torch.zeros(table, features, device="cuda")
    parts = {degree: [torch.zeros_like(part) for part in whole.chunk(degree)] for degree in DEGREES}
    twin = torch.zeros(table, features)
    for _ in range(2):
        rows, at = normal_on_gpu(tokens, features, dtype=dtype), torch.randint(table, (tokens,), device="cuda")
        at[::3] = 5
        row_add.add_rows(rows, at, whole, at_once)
        row_add.add_rows(rows.cpu(), at.cpu(), twin, at_once)
        for ranks in parts.values():
            for n, part in enumerate(ranks):
                mine = at - n * len(part)
                row_add.add_rows(rows, mine.masked_fill((mine < 0) | (mine >= len(part)), -1), part, at_once)
    assert same_bits(whole.cpu(), twin)
    assert all(same_bits(torch.cat(ranks), whole) for ranks in parts.values())


# [tokens, k, n] of one shard of Qwen3-0.6B and 8B, V = 8 and 4.
SHAPES = (
    (2048, 1024, 384),
    (2048, 4096, 1536),
    (2048, 1536, 4096),
    (2048, 512, 4096),
    (2048, 4096, 768),
    (8192, 4096, 3072),
)


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
