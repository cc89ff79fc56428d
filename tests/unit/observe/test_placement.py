# SPDX-License-Identifier: Apache-2.0
"""Parts of a tensor, cut as Megatron cuts them, have the digest of the whole, whatever the layout."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_invariant_recipes.kernels.digest import lanes
from tp_invariant_recipes.kernels.launch import TensorPart
from tp_invariant_recipes.observe import placement
from tp_invariant_recipes.observe.digests.sums import covers
from tp_invariant_recipes.observe.placement import ModuleRow, Site, row_of

CONFIG = SimpleNamespace(
    hidden_size=8,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=2,
    ffn_hidden_size=16,
    gated_linear_unit=True,
    num_moe_experts=4,
)
S, B = 16, 8
SECTIONS = (16, 16, 8, 8, 4)  # of the whole; widths unlike each other, as Mamba's
WIDTH = sum(SECTIONS)


def by_segment(x, sizes, tp):
    """What each of `tp` ranks has of a last dimension made of segments."""
    split = [segment.chunk(tp, -1) for segment in x.split(sizes, -1)]
    return [torch.cat(slices, -1) for slices in zip(*split, strict=True)]


# Kind of place -> the function that places it, the shape of the whole, the dimensions of samples and of positions, and
# how `tp` ranks cut the features; None: not at all.
HIDDEN, TOKENS = (S, B, 8), (B, S)
KINDS = {
    "hidden": (placement.hidden, HIDDEN, 1, 0, None),
    "embedded": (placement.embedded, HIDDEN, 1, 0, None),
    "tokens": (placement.tokens, TOKENS, 0, 1, None),
    "heads": (placement.heads("num_attention_heads"), (S, B, 8, 2), 1, 0, lambda x, tp: x.chunk(tp, 2)),
    "columns": (placement.columns(lambda c: 16), (S, B, 16), 1, 0, lambda x, tp: x.chunk(tp, 2)),
    "gated": (
        placement.columns(lambda c: 32, segments=lambda c: 2),
        (S, B, 32),
        1,
        0,
        lambda x, tp: by_segment(x, [16, 16], tp),
    ),
    "sliced": (placement.sliced, (S, B, 24), 1, 0, lambda x, tp: x.chunk(tp, 2)),
    "sections": (placement.sections, (S, B, WIDTH), 1, 0, lambda x, tp: by_segment(x, SECTIONS, tp)),
    "scores": (placement.scores, (B, 8, S, S), 0, None, lambda x, tp: x.chunk(tp, 1)),
    "experts": (placement.experts, (S, B, 4), 1, 0, None),
}
SPLIT_BY_SEQUENCE_PARALLELISM = ("hidden", "embedded", "experts")


def zigzag(x, dim, cp, rank):
    """Megatron's get_batch_on_this_cp_rank: tests/distributed/commands/test_trace.py compares it with the table."""
    chunks = x.chunk(2 * cp, dim)
    return x if cp == 1 else torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]], dim)


def parts_of_rank(kind, whole, site, micro_batches):
    """(micro-batch, tensor, module) of one rank."""
    batch, sequence, cut = KINDS[kind][2:]
    for m in range(micro_batches):
        first = (m * site.dp + site.dp_rank) * site.samples
        x = whole.narrow(batch, first, site.samples)
        if sequence is not None:
            x = zigzag(x, sequence, site.cp, site.cp_rank)
        if cut is not None:
            x = cut(x, site.tp)[site.tp_rank]
        elif site.sequence_parallel and kind in SPLIT_BY_SEQUENCE_PARALLELISM:
            x = x.chunk(site.tp, sequence)[site.tp_rank]
        module = SimpleNamespace(reduce_scatter_embeddings=site.sequence_parallel)
        if kind == "embedded" and not site.sequence_parallel:
            x = x.transpose(0, 1)  # Megatron's embedding gives [b, s, h]
        if kind == "experts":
            x = x.reshape(-1, x.shape[-1])
        if kind == "sections":
            module.weight = SimpleNamespace(partition_sizes=[size // site.tp for size in SECTIONS])
        yield m, x, module


def sites(tp, cp, dp, samples, sequence_parallel):
    for ranks in itertools.product(range(tp), range(cp), range(dp)):
        yield Site(CONFIG, S, B, samples, "single", sequence_parallel, tp, ranks[0], cp, ranks[1], dp, ranks[2])


def table(whole):
    """The tensor as the digest sees it: an activation's rows are positions and samples, of others all but the last."""
    return whole.flatten(2).flatten(0, 1) if whole.dim() == 3 or whole.shape[:2] == (S, B) else whole.flatten(0, -2)


LAYOUTS = st.tuples(
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2)),
    st.sampled_from((1, 2)),
    st.sampled_from((1, 2, 4)),
    st.booleans(),
).filter(lambda layout: not layout[4] or layout[0] > 1)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(layout=LAYOUTS, seed=st.integers(0, 9))
def test_parts_have_the_digest_of_the_whole(kind, layout, seed):
    lie, shape = KINDS[kind][:2]
    tp, cp, dp, samples, sequence_parallel = layout
    if kind == "scores":
        cp = 1
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    held = {}
    for site in sites(tp, cp, dp, samples, sequence_parallel):
        total, places = torch.zeros(2, dtype=torch.int64), ()
        for m, x, module in parts_of_rank(kind, whole, site, B // (dp * samples)):
            placed = lie(x, module, m, site)
            assert placed.shape == shape
            total += lanes(placed.parts).sum(0)
            places += placed.places
        assert held.setdefault(places, total.tolist()) == total.tolist()  # replicas
    assert covers([place for places in held for place in places], shape)
    total = torch.tensor(list(held.values())).sum(0)
    assert torch.equal(total, lanes([TensorPart(table(whole), 0, 0)]).sum(0))
    if len(held) > 1:
        lost = list(held)[1:]
        assert not covers([place for places in lost for place in places], shape)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "scores"])
def test_a_tensor_of_another_shape_has_no_place(kind):
    lie, shape, batch, sequence, _ = KINDS[kind]
    site = Site(CONFIG, S, B, B)
    module = SimpleNamespace(
        reduce_scatter_embeddings=True, weight=SimpleNamespace(partition_sizes=list(SECTIONS)), gather_output=False
    )
    x = torch.zeros(shape)
    lower_degree = x.narrow(batch, 1, B - 1), x.narrow(sequence, 1, S - 1), x.unsqueeze(0)
    for wrong in lower_degree:
        assert lie(wrong.flatten(0, 1) if kind == "experts" else wrong, module, 0, site) is None
    if kind not in ("tokens", "sliced"):
        assert lie(x[..., 1:] if x.dim() == 3 else x[:, :, 1:], module, 0, site) is None


def test_heads_that_every_rank_has_a_copy_of_have_no_place():
    """Fewer key heads than ranks: the copies are equal, but the gradients they get are not."""
    site = Site(CONFIG, S, B, B, tp=8)
    assert placement.heads("num_query_groups")(torch.zeros(S, B, 1, 2), None, 0, site) is None
    assert placement.heads("num_attention_heads")(torch.zeros(S, B, 1, 2), None, 0, site) is not None


def test_a_gathered_output_has_no_place():
    assert placement.sliced(torch.zeros(S, B, 4), SimpleNamespace(gather_output=True), 0, Site(CONFIG, S, B, B)) is None


def test_an_unknown_data_loader_gives_nothing_a_place():
    site = Site(CONFIG, S, B, B, sampler="cyclic")
    assert placement.hidden(torch.zeros(HIDDEN), None, 0, site) is None
    assert placement.tokens(torch.zeros(TOKENS), None, 0, site) is None


def test_batch_loader_deals_samples_out_in_turn():
    numbers = [Site(CONFIG, S, B, 2, "batch", dp=2, dp_rank=rank).numbers(m) for rank in (0, 1) for m in (0, 1)]
    assert numbers == [[0, 2], [4, 6], [1, 3], [5, 7]]


def test_a_constant_counts_once():
    site = Site(CONFIG, S, B, 1)
    x = torch.arange(S * 3.0).view(S, 1, 1, 3)
    first, second = (placement.constant(x, None, m, site) for m in (0, 1))
    assert covers(first.places, (S, 1, 1, 3))
    assert second.parts == ()


def made(name, *bases):
    return type(name, bases or (object,), {})()


def test_a_row_is_located_by_class_and_name():
    column = type("ColumnParallelLinear", (), {})
    actual = made("InvariantColumnParallelLinear", column)
    assert row_of(actual, "decoder.layers.0.mlp.linear_fc1").outputs != row_of(actual, "output_layer").outputs
    assert row_of(actual, "decoder.layers.0.self_attention.linear_q_down_proj") is None
    assert row_of(made("SomethingNew"), "decoder.layers.0.mlp") is None
    attention = type("DotProductAttention", (), {})  # Transformer Engine's own has this name, too
    assert row_of(made("TEDotProductAttention", attention), "core_attention").below == "skipped"
    assert row_of(attention(), "core_attention").below == "traced"


def test_every_row_is_reachable():
    """A row that an earlier one always precedes would be dead."""
    for n, row in enumerate(placement.ROWS):
        earlier = placement.ROWS[:n]
        for name in row.names or ("anything",):
            shadowed = all(any(hides(e, kind, name) for e in earlier) for kind in row.classes)
            assert not shadowed, row


def hides(row: ModuleRow, kind: str, name: str) -> bool:
    return kind in row.classes and (not row.names or name in row.names)
