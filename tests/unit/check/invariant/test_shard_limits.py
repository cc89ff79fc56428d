# SPDX-License-Identifier: Apache-2.0
"""What V, D, C and X may be."""

import pytest
import torch

from tests.unit.comparison.ledgers import ledger
from tp_invariant_recipes.comparison.compare import compare
from tp_invariant_recipes.comparison.text import verdict_line
from tp_invariant_recipes.config.compose import compose as composed
from tp_invariant_recipes.config.fingerprint import fingerprint
from tp_invariant_recipes.ledger.schema import CONTEXT_SHARDS, DATA_SHARDS, Header, fingerprint_differences
from tp_invariant_recipes.numerics.layers.attention import HeadExchange
from tp_invariant_recipes.numerics.sums import data_shards
from tp_invariant_recipes.observe.placement import Site
from tp_invariant_recipes.sizing import memory
from tp_invariant_recipes.sizing.memory import ACTIVATIONS, GRADIENTS


def composed_config(*overrides, model="qwen3_toy"):
    return composed(model, overrides, device="cpu").config


@pytest.mark.parametrize(
    "key, overrides, shards",
    (
        (DATA_SHARDS, (), 1), (DATA_SHARDS, ("dp=4", "gbs=8"), 4), (DATA_SHARDS, ("numerics=stock",), None),
        (DATA_SHARDS, ("dp=2", "gbs=8", "numerics.data_shards=8"), 8),
        (DATA_SHARDS, ("dp=2", "gbs=8", "numerics=gather"), 2),
        (CONTEXT_SHARDS, (), 1), (CONTEXT_SHARDS, ("cp=4",), 4), (CONTEXT_SHARDS, ("numerics=stock",), None),
        (CONTEXT_SHARDS, ("cp=2", "numerics.context_shards=4"), 4),
    ),
)  # fmt: skip
def test_the_default_is_the_degree(key, overrides, shards):
    config = composed_config(*overrides)
    assert config.at(key) == shards
    assert fingerprint(config, None).get(key) == shards


@pytest.mark.parametrize("key", (DATA_SHARDS, CONTEXT_SHARDS))
def test_runs_of_other_shards_are_not_comparable_and_the_key_is_named(key):
    two, four, stock = (Header(identity={"rng.seed": 1} | shards) for shards in ({key: 2}, {key: 4}, {}))
    (difference,) = fingerprint_differences(two, four)
    assert (difference.field, difference.a, difference.b) == (key, "2", "4")
    assert fingerprint_differences(two, stock) == ()
    line = verdict_line(compare(ledger(header=two), ledger(header=four)))
    assert line.endswith(f"{key} is 2 and 4; train both with {key}=4")


def test_micro_batches_are_no_part_of_the_identity():
    for numerics in ("tree", "stock"):
        first, second = (
            fingerprint(composed_config("gbs=8", f"mbs={mbs}", f"numerics={numerics}"), None) for mbs in (1, 4)
        )
        assert first == second


@pytest.mark.parametrize("sequences, less", ((16, 0), (8, 1)))
def test_memory_grows_with_log2_of_the_shards_of_a_rank(sequences, less):
    """less: gradients that shards of one sequence save."""
    rows = ("", "numerics.data_shards=2", *(f"dp={dp} numerics.data_shards=8" for dp in (1, 4, 2)))
    configs = (composed_config(f"gbs={sequences}", *row.split()) for row in rows)
    first, *others = (memory.estimate(config).parts[GRADIENTS] for config in configs)
    assert others == [2 * first, (4 - less) * first, (2 - less) * first, (3 - less) * first]


def test_memory_of_expert_groups():
    """ep=2 over two data-parallel ranks: half of the experts, each with a gradient for each group."""

    def gradients(*words):
        return memory.estimate(composed_config("dp=2", "gbs=4", *words, model="qwen3_moe_toy")).parts[GRADIENTS]

    separate, first, second = gradients(), gradients("ep=2"), gradients("ep=2", "numerics.expert_groups=2")
    assert second == separate
    stock = gradients("ep=2", "numerics=stock")
    assert first == stock < second
    # Two data shards of a rank, of two sequences each, take turns: two buffers of all but the experts.
    turns = gradients("ep=2", "gbs=8", "numerics.data_shards=4")
    assert turns - first == first - (second - first)


def test_a_micro_batch_of_several_takes_the_memory_of_one():
    for numerics, grows in (("tree", False), ("stock", True)):
        single, four = (
            memory.estimate(composed_config("gbs=8", f"mbs={mbs}", f"numerics={numerics}")).parts[ACTIVATIONS]
            for mbs in (1, 4)
        )
        assert (four > single) is grows


def test_a_rank_keeps_a_gradient_of_each_shard():
    of_gradients = [
        memory.estimate(composed_config(f"cp={cp}", "numerics.context_shards=4")).parts[GRADIENTS] for cp in (1, 2, 4)
    ]
    assert of_gradients[0] == 2 * of_gradients[1] == 4 * of_gradients[2]


def _zigzag(length, ranks, rank):
    """As Megatron cuts a sequence."""
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


@pytest.mark.parametrize("cp", (1, 2, 4))
def test_context_parallel_ranks_hold_consecutive_shards(cp):
    """With as many shards as ranks the cut is Megatron's. A trace places a rank's positions so."""
    whole = torch.cat([_zigzag(32, 4, shard) for shard in range(4)])
    held = [data_shards.positions(32, 4, cp, rank) for rank in range(cp)]
    assert torch.equal(torch.cat(held), whole)
    for rank in range(cp):
        assert torch.equal(data_shards.positions(32, cp, cp, rank), _zigzag(32, cp, rank))
        parts = Site(None, 32, 1, 1, cp=cp, cp_rank=rank, context_shards=4).positions(split=False)
        assert [n for first, count in parts for n in range(first, first + count)] == held[rank].tolist()


def test_a_sequence_that_chunks_do_not_divide_is_an_error():
    with pytest.raises(ValueError, match="4 context shards of two chunks each do not divide 36 positions"):
        data_shards.positions(36, 4)


def test_one_rank_puts_the_tokens_in_order_for_attention_and_back():
    held = data_shards.positions(16, 2)
    x = held.float().view(16, 1, 1, 1).expand(16, 1, 4, 2).clone().requires_grad_()
    exchange = HeadExchange(2)
    in_order = exchange.to_heads(x)
    assert in_order[:, 0, 0, 0].tolist() == list(range(16))
    back = exchange.to_tokens(in_order.flatten(2), 4)
    assert torch.equal(back.detach(), x.detach().flatten(2))
    back.backward(torch.arange(16.0).view(16, 1, 1).expand_as(back))
    assert torch.equal(x.grad[:, 0, 0, 0], torch.arange(16.0))
