# SPDX-License-Identifier: Apache-2.0
"""Norms, cross entropy, core attention and embeddings on ranks: the same bits for every degree, right, and stock's not.

A function is a row: its operands, what a rank computes, the same as Megatron does it, and the same in fp64.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from tests.distributed.ranks import FIRST, megatron, on_ranks, together, unequal
from tests.operands import same_bits
from tp_invariant_recipes.kernels import cross_entropy as kernel
from tp_invariant_recipes.kernels.row_sums import folding_sum
from tp_invariant_recipes.numerics.layers.cross_entropy import vocab_parallel_cross_entropy
from tp_invariant_recipes.numerics.layers.norm import NormShards, rms_norm
from tp_invariant_recipes.numerics.megatron import replacements, spec
from tp_invariant_recipes.numerics.settings import NumericsSettings
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.weight_gradient import added_to_main_grad
from tp_invariant_recipes.replacement import applied

SIZES = (1, 2, 4)
DTYPES = (torch.float32, torch.bfloat16)
WHOLE, SLICE, HEADS = NormShards
ALONE, EPS = VirtualMesh(1, 1, 0), 1e-6


@dataclass(frozen=True)
class Row:
    """A function.

    operands: of a dtype. step: of a mesh of V = shards and the operands → name → tensor, where it lies (`together`).
    stock:    as `step`, as Megatron does it, and what of it depends on the degree.
    exact:    of fp64 operands, as autograd has it; `near`: for each dtype.
    """

    operands: Callable
    step: Callable
    shards: int = 8
    stock: Callable | None = None
    depends: tuple[str, ...] = ()
    exact: Callable | None = None
    near: tuple[float, float] = (1e-5, 8e-3)
    dtypes: tuple[torch.dtype, ...] = DTYPES


def drawn(dtype, *shapes, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(shape).to(dtype) for shape in shapes]


# --- norms ---


def mine(tensor, mesh, shards_of):
    """This rank's slice, in memory of its own."""
    if shards_of is WHOLE:
        return tensor.clone()
    return tensor.chunk(mesh.size, 2 if shards_of is HEADS else 0)[mesh.rank].contiguous()


def norm_operands(kind, dtype, chunk=4, batch=2, width=97):
    """x, weight, dy: of 8 shards of rows, or of heads."""
    shape = (3, batch, 8 * chunk, width) if kind is HEADS else (8 * chunk, batch, width)
    return drawn(dtype, shape, (width,), shape)


def special_norm(kind, dtype):
    """NaN, infinities and large numbers in all operands."""
    x, weight, dy = norm_operands(kind, dtype, 2)
    for row, value in enumerate((math.nan, math.inf, -math.inf, 1e30)):
        x.view(-1, 97)[4 * row, 7 * row] = value
        dy.view(-1, 97)[4 * row + 1, 9 * row] = value
    weight[5] = math.inf
    return x, weight, dy


def zero_norm(kind, dtype):
    """Gradients of negative zeros."""
    shape = (2, 1, 8, 4) if kind is HEADS else (8, 1, 4)
    return [torch.full(s, v, dtype=dtype) for s, v in ((shape, 1), ((4,), 1), (shape, -0.0))]


def norm_step(kind, mesh, x, weight, dy, stock=False):
    """In stock all rows of the rank, then an all-reduce, give the weight gradient."""
    x, weight = mine(x, mesh, kind).requires_grad_(), weight.clone().requires_grad_()
    y = rms_norm(x, weight, EPS, *((ALONE, WHOLE) if stock else (mesh, kind)))
    y.backward(mine(dy, mesh, kind))
    if stock:
        dist.all_reduce(weight.grad)
    along = {WHOLE: None, SLICE: 0, HEADS: 2}[kind]
    of_weight = None if stock or kind is WHOLE else FIRST
    return {"output": (y.detach(), along), "dx": (x.grad, along), "weight gradient": (weight.grad, of_weight)}


def exact_norm(x, weight, dy):
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, EPS)
    return dict(zip(("output", "dx", "weight gradient"), (y, *torch.autograd.grad(y, (x, weight), dy)), strict=True))


def _norms():
    for kind in NormShards:
        step, stock = partial(norm_step, kind), None if kind is WHOLE else partial(norm_step, kind, stock=True)
        yield (
            f"norm {kind.name}",
            Row(
                partial(norm_operands, kind),
                step,
                stock=stock,
                depends=("weight gradient",) * bool(stock),
                exact=exact_norm,
            ),
        )
        yield f"norm {kind.name}, special", Row(partial(special_norm, kind), step)
        yield f"norm {kind.name}, zeros", Row(partial(zero_norm, kind), step)


# --- cross entropy ---


def loss_operands(dtype, shape=(8, 2, 1016), seed=0):
    """Logits, the loss's gradient, targets."""
    logits, gradient = drawn(torch.float32, shape, shape[:2], seed=seed)
    return (logits * 4).to(dtype), gradient, torch.randint(shape[2], shape[:2])


def special_losses(dtype):
    """NaN and infinities as logits, of the target too, and as gradients."""
    logits, gradient, target = loss_operands(dtype, (16, 1, 72))
    for row, (value, at) in enumerate(product((math.nan, math.inf, -math.inf), (0, 40, 71))):
        logits[row, 0, at] = value
        target[row] = at if row % 2 else 5
    logits[9] = -math.inf
    logits[10, 0, 3], logits[10, 0, 60] = math.nan, -math.nan
    gradient[11], gradient[12] = math.nan, math.inf
    return logits, gradient, target


def zero_losses(dtype):
    """Zeros of both signs, and all of the probability on a target."""
    logits = torch.zeros(4, 2, 16, dtype=dtype)
    logits[0, :, ::2] = -0.0
    logits[1] = -0.0
    logits[2, :, 1:] = logits[3, :, :15] = -math.inf
    return logits, -torch.ones(4, 2), torch.tensor([[0, 1], [14, 15], [0, 0], [15, 15]])


def outside(dtype):
    """Targets that are not in the vocabulary."""
    logits, gradient, target = loss_operands(dtype, (4, 1, 32))
    target[0], target[1] = -100, 32
    return logits, gradient, target


def small_losses(dtype):
    """They show the last bits of the sum."""
    logits, gradient, _ = loss_operands(dtype)
    return logits, gradient, logits.argmax(-1)


def strided(dtype):
    """As they lie in memory as [b, s, vocab]."""
    logits, gradient, target = loss_operands(dtype)
    return (*(x.transpose(0, 1).contiguous().transpose(0, 1) for x in (logits, gradient, target)),)


def loss_step(mesh, logits, gradient, target):
    part = logits.chunk(mesh.size, -1)[mesh.rank].clone(memory_format=torch.preserve_format).requires_grad_()
    before = part.detach().clone()
    loss = vocab_parallel_cross_entropy(part, target, mesh)
    loss.backward(gradient)
    assert same_bits(before, part.detach()), "logits were overwritten"
    return {"loss": (loss.detach().contiguous(), None), "dlogits": (part.grad.contiguous(), -1)}


def stock_loss(mesh, logits, gradient, target):
    """Exponentials of the whole local vocabulary, then an all-reduce."""
    logits = logits.chunk(mesh.size, -1)[mesh.rank].float()
    highest = logits.amax(-1)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    logits = logits - highest.unsqueeze(-1)
    hot = torch.arange(logits.shape[-1]) + mesh.rank * logits.shape[-1] == target.unsqueeze(-1)
    picked, total = (logits * hot).sum(-1), logits.exp().sum(-1)
    dist.all_reduce(picked)
    dist.all_reduce(total)
    dlogits = (logits.exp() / total.unsqueeze(-1) - hot.float()) * gradient.unsqueeze(-1)
    return {"loss": (total.log() - picked, None), "dlogits": (dlogits, -1)}


def exact_loss(logits, gradient, target):
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(target)
    return {"loss": loss, "dlogits": torch.autograd.grad(loss, logits, gradient)[0]}


LOSSES = {
    "cross entropy": Row(loss_operands, loss_step, exact=exact_loss, near=(1e-6, 4e-3)),
    "cross entropy, V=4": Row(loss_operands, loss_step, 4),
    "cross entropy, special": Row(special_losses, loss_step),
    "cross entropy, special, V=4": Row(special_losses, loss_step, 4),
    "cross entropy, zeros": Row(zero_losses, loss_step),
    "cross entropy, small": Row(small_losses, loss_step, stock=stock_loss, depends=("loss", "dlogits")),
    "cross entropy, outside": Row(outside, loss_step, dtypes=DTYPES[:1]),
    "cross entropy, strided": Row(strided, loss_step, dtypes=DTYPES[1:]),
}

# --- core attention ---

SEQUENCE, BATCH, Q_HEADS, GROUPS, WIDTH = 64, 2, 8, 4, 16
ATTENDED = ("output", "query", "key", "value")


def lying(self, query, key, value, *mask, original=DotProductAttention.forward):
    """A sum of two parts with roundings of its own, unless the heads are those of one shard of four."""
    if query.shape[2] == Q_HEADS // 4:
        return original(self, query, key, value, *mask)
    return sum(original(self, query, key, value * part, *mask) for part in (0.7, 0.3))


def attention_operands(dtype):
    return drawn(dtype, *((SEQUENCE, BATCH, heads, WIDTH) for heads in (Q_HEADS, GROUPS, GROUPS, Q_HEADS)))


def attention_step(invariant, mesh, *tensors):
    """Output and gradients of this rank's heads, on a backend whose results depend on the number of heads."""
    config = TransformerConfig(
        num_layers=1, hidden_size=Q_HEADS * WIDTH, num_attention_heads=Q_HEADS, num_query_groups=GROUPS,
        attention_dropout=0.0, masked_softmax_fusion=False, tensor_model_parallel_size=mesh.size,
        bf16=tensors[0].dtype == torch.bfloat16, params_dtype=tensors[0].dtype,
    )  # fmt: skip
    config.virtual_shards = mesh.shards
    layer = spec.invariant(DotProductAttention) if invariant else DotProductAttention
    module = layer(config=config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")
    *leaves, gradient = (tensor.chunk(mesh.size, 2)[mesh.rank].clone() for tensor in tensors)
    out = module(*(leaf.requires_grad_() for leaf in leaves), torch.ones(1, 1, SEQUENCE, SEQUENCE).bool().triu(1))
    out.backward(gradient.reshape(out.shape))
    results = out.detach().unflatten(2, (-1, WIDTH)), *(leaf.grad for leaf in leaves)
    return {name: (result, 2) for name, result in zip(ATTENDED, results, strict=True)}


# --- embedding ---

VOCABULARY, HIDDEN, MICRO_BATCHES = 16, 24, 3


def embedding_operands(dtype):
    """For each micro-batch ids [b, s], of which every row has many, one more than all others; a gradient [b, s, h]."""
    results = []
    for n in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(n)
        ids = torch.randint(VOCABULARY, (BATCH, 32), generator=generator)
        ids[:, ::3] = 5
        results += [ids, torch.randn(BATCH, 32, HIDDEN, generator=generator).to(dtype)]
    return results


class _Output(torch.autograd.Function):
    """Every micro-batch also adds one to the buffer, as an output layer would."""

    @staticmethod
    def forward(ctx, y, weight):
        ctx.save_for_backward(weight)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        (weight,) = ctx.saved_tensors
        weight.main_grad += 2.0**-9  # which takes the last bits of a sum of lookups that it is added to in turns
        return dy, added_to_main_grad(weight)


def embedding_step(invariant, tied, slices, mesh, *batches):
    """This rank's rows of the weight gradient, in Megatron's buffer."""
    from tp_invariant_recipes.numerics.megatron.local import InvariantVocabParallelEmbedding

    kind, dtype = InvariantVocabParallelEmbedding if invariant else VocabParallelEmbedding, batches[1].dtype
    slices = slices and mesh.size > 1
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, params_dtype=dtype, bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=mesh.size, sequence_parallel=slices,
    )  # fmt: skip
    embedding = kind(
        VOCABULARY, HIDDEN, init_method=torch.nn.init.ones_, reduce_scatter_embeddings=slices, config=config
    )
    embedding.weight.zero_out_wgrad = tied
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), embedding)
    for ids, dy in zip(batches[::2], batches[1::2], strict=True):
        dy = dy.transpose(0, 1).chunk(mesh.size)[mesh.rank] if slices else dy
        y = model(ids)
        (_Output.apply(y, embedding.weight) if tied else y).backward(dy)
    model.finish_grad_sync()
    return {"weight gradient": (embedding.weight.main_grad.clone(), 0)}


def lookups(tied, batches):
    """The weight gradient by its definition."""
    total = torch.zeros(VOCABULARY, HIDDEN)
    for ids, dy in zip(batches[::2], batches[1::2], strict=True):
        for row, gradient in zip(ids.flatten().tolist(), dy.flatten(0, 1), strict=True):
            total[row] += gradient.float()
    return total + MICRO_BATCHES * 2.0**-9 * tied


IN_MEGATRON = {
    "core attention": Row(
        attention_operands, partial(attention_step, True), 4, partial(attention_step, False), ATTENDED
    )
} | {
    f"embedding, tied={tied}, slices={slices}": Row(
        embedding_operands, partial(embedding_step, True, tied, slices), 4, partial(embedding_step, False, tied, slices)
    )
    for tied, slices in product((False, True), repeat=2)
}
ROWS = dict(_norms()) | LOSSES | IN_MEGATRON
CASES = [(name, dtype) for name, row in ROWS.items() for dtype in row.dtypes]


def everything(mesh):
    """All on one set of ranks, since a fork costs more than what it computes: (row, dtype, whether stock) → results."""
    results = {}
    DotProductAttention.forward = lying
    with megatron(mesh), applied(replacements.replacements(NumericsSettings(virtual_shards=4))):
        for name, dtype in CASES:
            row = ROWS[name]
            on = VirtualMesh(row.shards, mesh.size, mesh.rank, mesh.group)
            results[name, dtype, False] = row.step(on, *row.operands(dtype))
            if row.stock:
                results[name, dtype, True] = row.stock(on, *row.operands(dtype))
        results["micro-batches"] = [
            micro_batches(mesh, kind, *norm_operands(kind, dtype, 2, 3, 33)) for kind in NormShards for dtype in DTYPES
        ]
    return results


@pytest.fixture(scope="module")
def ranks(bridge):
    """Degree → what each of its ranks computed."""
    return {size: on_ranks(size, 8, everything) for size in SIZES}


@pytest.fixture(scope="module")
def results(ranks):
    """(row, dtype, whether stock) → of each degree, the whole tensors."""
    cases = [case for case in ranks[1][0] if case != "micro-batches"]
    return {case: [together([rank[case] for rank in ranks[size]]) for size in SIZES] for case in cases}


@pytest.mark.parametrize("name, dtype", CASES, ids=str)
def test_one_result_for_all_degrees(results, name, dtype):
    first, *others = results[name, dtype, False]
    assert [unequal(first, other) for other in others] == [[]] * len(others)


# Of a norm in bf16 rounding hides it.
SEVERAL = [(name, dtype) for name, dtype in CASES if ROWS[name].depends and (name[:4] != "norm" or dtype == DTYPES[0])]


@pytest.mark.parametrize("name, dtype", SEVERAL, ids=str)
def test_stock_has_several(results, name, dtype):
    single, _, four = results[name, dtype, True]
    assert {*unequal(single, four)} == {*ROWS[name].depends}
    for part, tensor in four.items():
        if tensor.dtype == torch.float32:
            torch.testing.assert_close(single[part], tensor)


@pytest.mark.parametrize("name, dtype", [case for case in CASES if ROWS[case[0]].exact], ids=str)
def test_they_are_near_to_fp64(results, name, dtype):
    row, near = ROWS[name], dict(zip(DTYPES, ROWS[name].near, strict=True))[dtype]
    operands = [x.double().requires_grad_() if x.is_floating_point() else x for x in row.operands(dtype)]
    for part, exact in row.exact(*operands).items():
        result = results[name, dtype, False][-1][part]
        assert result.dtype == (torch.float32 if part == "loss" else dtype)
        torch.testing.assert_close(
            result.double(), exact, rtol=near if part != "loss" else 1e-6, atol=near if part != "dlogits" else 1e-7
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_of_a_sequence_are_its_rows(results, dtype):
    """Sequence parallelism changes nothing of a norm, and the order in memory nothing of a loss."""
    assert (
        unequal(results["norm SEQUENCE_WHOLE", dtype, False][0], results["norm SEQUENCE_SLICE", dtype, False][0]) == []
    )
    if dtype in ROWS["cross entropy, strided"].dtypes:
        first, other = (results[name, dtype, False][0] for name in ("cross entropy", "cross entropy, strided"))
        assert unequal(first, other) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_numbers_stay_where_they_are(results, dtype):
    for kind in NormShards:
        special, zeros = (results[f"norm {kind.name}, {of}", dtype, False][0] for of in ("special", "zeros"))
        assert special["weight gradient"].isnan().all()
        assert 0 < special["output"].isnan().sum() < special["output"].numel() / 2
        assert special["dx"].isnan().any()
        assert not zeros["weight gradient"].signbit().any()
    for more in ("", ", V=4"):
        special = results[f"cross entropy, special{more}", dtype, False][0]
        loss, dlogits, rows = special["loss"][:, 0], special["dlogits"], torch.arange(16)
        assert rows[loss.isnan()].tolist() == [0, 1, 2, 3, 4, 5, 9, 10]
        assert rows[loss.isposinf()].tolist() == [7]  # the target's logit is -inf
        assert rows[dlogits[:, 0].isnan().all(-1)].tolist() == [0, 1, 2, 3, 4, 5, 9, 10, 11]
        assert dlogits[13:].isfinite().all()
    assert results["cross entropy, zeros", dtype, False][0]["loss"][2:].tolist() == [[0.0, 0.0]] * 2


def test_a_target_outside_the_vocabulary_picks_nothing(results):
    logits, gradient, _ = outside(torch.float32)
    softmax = logits.softmax(-1) * gradient.unsqueeze(-1)
    result = results["cross entropy, outside", torch.float32, False][0]["dlogits"]
    torch.testing.assert_close(result[:2], softmax[:2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_is_by_definition_that_of_a_shard(results, dtype):
    """At tp=4 a rank has one shard, and stock attention computes it alone."""
    assert unequal(results["core attention", dtype, False][0], results["core attention", dtype, True][2]) == []


@pytest.mark.parametrize("name, dtype", [case for case in CASES if case[0].startswith("embedding")], ids=str)
def test_lookups_are_added_as_defined_and_megatrons_are_not(results, name, dtype):
    """Megatron adds a micro-batch in the weight's dtype first, and micro-batches in turns with the output layer."""
    expected = lookups("tied=True" in name, embedding_operands(dtype))
    assert same_bits(results[name, dtype, False][0]["weight gradient"], expected)
    for stock in results[name, dtype, True]:
        error = (stock["weight gradient"] - expected).norm() / expected.norm()
        assert 0 < error < 1e-6 if dtype == torch.float32 else 1e-4 < error < 1e-1


# --- more of norms ---


def micro_batches(mesh, kind, x, weight, dy):
    """main_grad after three micro-batches, and the sum of the fp32 gradients; what autograd got."""
    weight = weight.clone().requires_grad_()
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    weight.grad_added_to_main_grad = False
    added, fired = torch.zeros_like(weight.main_grad), []
    weight.register_hook(lambda gradient: fired.append(gradient.dtype))
    for part, gradient in zip(x.chunk(3, 1), dy.chunk(3, 1), strict=True):
        rms_norm(mine(part, mesh, kind), weight, EPS, mesh, kind).backward(mine(gradient, mesh, kind))
        added += norm_step(kind, mesh, part, weight.detach().float(), gradient)["weight gradient"][0]
    assert fired == [weight.dtype] * 3
    assert weight.grad_added_to_main_grad
    assert weight.grad.dtype == weight.dtype
    assert same_bits(weight.main_grad, added)
    return {"main_grad": (weight.main_grad, None if kind is WHOLE else FIRST)}


def test_micro_batches_are_added_in_main_grad(ranks):
    for cases in zip(
        *(zip(*(rank["micro-batches"] for rank in ranks[size]), strict=True) for size in SIZES), strict=True
    ):
        first, *others = map(together, cases)
        assert [unequal(first, other) for other in others] == [[], []]


@pytest.mark.parametrize("shards_of", NormShards, ids=lambda s: s.name)
def test_shards_that_do_not_fit_are_named(shards_of):
    x, weight = drawn(torch.float32, (1, 1, 12, 4) if shards_of is HEADS else (12, 1, 4), (4,))
    what = "heads" if shards_of is HEADS else "positions"
    with pytest.raises(ValueError, match=f"8 virtual shards do not divide the norm's 12 {what}"):
        rms_norm(x, weight.requires_grad_(), EPS, VirtualMesh(8, 1, 0), shards_of)
    with torch.no_grad():  # no weight gradient, no shards
        rms_norm(x, weight, EPS, VirtualMesh(8, 1, 0), shards_of)


@given(n=st.integers(1, 50))
def test_folding_adds_each_value_once(n):
    values = torch.tensor([[float(i), 100.0 * i] for i in range(n)])
    assert folding_sum(values, 0).tolist() == [n * (n - 1) / 2, 100.0 * n * (n - 1) / 2]


def test_a_norm_of_keys_keeps_keys_alone():
    """They are a slice of what holds queries and values too. The bits are those of keys in memory of their own."""
    whole, weight, dy = drawn(torch.bfloat16, (6, 1, 4, 8), (8,), (6, 1, 4, 8))
    keys = whole.requires_grad_()[:, :, 1:3]
    results, ys = (keys, keys.detach().clone().requires_grad_()), []
    for x in results:
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            ys.append(rms_norm(x, weight, EPS, VirtualMesh(2, 1, 0), HEADS))
        assert max(t.untyped_storage().nbytes() for t in kept) == keys.numel() * 2
        ys[-1].backward(dy[:, :, :2])
    assert same_bits(*ys)
    assert same_bits(whole.grad[:, :, 1:3].contiguous(), results[1].grad)


# --- more of cross entropy ---


@pytest.mark.parametrize("width", (1, 31, 64, 97, 1000, 1025))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(dtype, width):
    mesh, operands = VirtualMesh(4, 1, 0), loss_operands(dtype, (40, 1, 4 * width))
    whole = together([loss_step(mesh, *operands)])
    for n in (*range(1, 10), 16, 17):
        rows = slice(3, 3 + n)
        alone = together([loss_step(mesh, *(part[rows] for part in operands))])
        assert unequal({name: part[rows] for name, part in whole.items()}, alone) == []


def largest(mesh, *operands) -> int:
    """The most elements of any fp32 tensor made on the way."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sizes(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.dtype == torch.float32:
                self.most = max(self.most, result.numel())
            return result

    with Sizes() as sizes:
        loss_step(mesh, *operands)
    return sizes.most


@pytest.mark.parametrize("limit, shards", ((0, 1), (1, 1), (2, 2), (100, 8)))
def test_no_more_is_held_in_fp32_than_fits(monkeypatch, limit, shards):
    """Small shards several at a time, large ones one by one. limit: in shards."""
    alone = 4 * 2 * 512 // 8
    monkeypatch.setattr(kernel, "NUMBERS_AT_ONCE", limit * alone)
    assert largest(VirtualMesh(8, 1, 0), *loss_operands(torch.bfloat16, (4, 2, 512))) == shards * alone


@pytest.mark.parametrize("rows, width", ((4, 8), (2, 48), (128, 64), (5, 96)))
def test_batched_shards_have_the_bits_that_each_has_alone(monkeypatch, rows, width):
    logits, highest = torch.randn(rows, 8 * width) * 4, torch.randn(rows)
    (joined,) = kernel._exponentials(logits, highest, 8)
    monkeypatch.setattr(kernel, "NUMBERS_AT_ONCE", 0)
    assert same_bits(joined, torch.cat(list(kernel._exponentials(logits, highest, 8)), -1))


def test_shards_that_are_no_whole_vectors_are_taken_one_by_one():
    """torch computes what fills no vector with other code, which a build of it may round in another way."""
    highest = torch.zeros(7)
    assert [len(list(kernel._exponentials(torch.randn(7, 8 * n), highest, 8))) for n in (32, 33)] == [1, 8]


def test_a_vocabulary_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match="8 virtual shards do not divide a vocabulary of 100"):
        vocab_parallel_cross_entropy(torch.zeros(1, 1, 50), torch.zeros(1, 1).long(), VirtualMesh(8, 2, 0))


def test_a_key_that_heads_share_adds_their_gradients_in_order(bridge):
    """Those of a shard, first to last: multi-latent attention."""
    from tp_invariant_recipes.numerics.megatron.attention.mla import _Spread

    key, big = torch.zeros(1, 1, 1, 1, requires_grad=True), 2.0**24  # the number after it is big + 2
    for gradients, total in (([big, 1, -big], 0.0), ([big, -big, 1], 1.0)):
        spread = _Spread.apply(key, 3, VirtualMesh(1, 1, 0))
        (gradient,) = torch.autograd.grad(spread, key, torch.tensor(gradients).view(1, 1, 3, 1))
        assert gradient.item() == total
