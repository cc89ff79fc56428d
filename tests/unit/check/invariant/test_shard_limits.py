"""What V, D, C and X may be."""

import pytest
import torch

from tests.unit.compare.ledgers import ledger
from tp_invariant_recipes.compare.compare import compare
from tp_invariant_recipes.compare.text import verdict_line
from tp_invariant_recipes.config.compose import compose as composed
from tp_invariant_recipes.config.identity import identity
from tp_invariant_recipes.ledger.schema import CONTEXT_SHARDS, DATA_SHARDS, Header, identity_differences
from tp_invariant_recipes.numerics.layers.attention import HeadExchange
from tp_invariant_recipes.numerics.sums import data_shards
from tp_invariant_recipes.observe.placement import Site
from tp_invariant_recipes.sizing import memory, room
from tp_invariant_recipes.sizing.memory import ACTIVATIONS, GRADIENTS


def composed_config(*overrides, model="qwen3_toy"):
    return composed(model, overrides, device="cpu").config


@pytest.mark.parametrize(
    "overrides, shards",
    (
        ((), 1),
        (("dp=4", "gbs=8"), 4),
        (("dp=2", "gbs=8", "numerics.data_shards=8"), 8),
        (("dp=2", "gbs=8", "numerics=gather"), 2),
        (("dp=2", "gbs=8", "numerics=stock"), None),
    ),
)
def test_the_default_is_dp(overrides, shards):
    result = composed_config(*overrides)
    assert result.numerics.data_shards == shards
    assert identity(result, None).get(DATA_SHARDS) == shards


def test_micro_batches_are_no_part_of_the_identity():
    for numerics in ("tree", "stock"):
        first, second = (
            identity(composed_config("gbs=8", f"mbs={mbs}", f"numerics={numerics}"), None) for mbs in (1, 4)
        )
        assert first == second


def _header_with(**fields):
    return Header(identity={"rng.seed": 1} | fields)


def test_runs_of_other_data_shards_are_not_comparable():
    (difference,) = identity_differences(_header_with(**{DATA_SHARDS: 2}), _header_with(**{DATA_SHARDS: 4}))
    assert (difference.field, difference.a, difference.b) == (DATA_SHARDS, "2", "4")


def test_stock_runs_are_comparable_with_any():
    assert identity_differences(_header_with(**{DATA_SHARDS: 2}), _header_with()) == ()


@pytest.mark.parametrize("sequences, less", ((16, 0), (8, 1)))
def test_memory_grows_with_log2_of_the_shards_of_a_rank(sequences, less):
    """less: gradients that shards of one sequence save."""
    first, second, eight, four_ranks, two_ranks = (
        memory.estimate(composed_config(f"gbs={sequences}", *overrides)).parts[GRADIENTS]
        for overrides in (
            (),
            ("numerics.data_shards=2",),
            ("numerics.data_shards=8",),
            ("dp=4", "numerics.data_shards=8"),
            ("dp=2", "numerics.data_shards=8"),
        )
    )
    assert (second, eight, four_ranks, two_ranks) == (
        2 * first,
        (4 - less) * first,
        (2 - less) * first,
        (3 - less) * first,
    )


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


def test_a_comparison_names_the_key():
    two, four = (ledger(header=_header_with(**{DATA_SHARDS: shards})) for shards in (2, 4))
    line = verdict_line(compare(two, four))
    assert line.endswith(f"{DATA_SHARDS} is 2 and 4; train both with {DATA_SHARDS}=4")


@pytest.mark.parametrize(
    "overrides, says, says_not",
    (
        (("numerics.data_shards=8",), "raise dp= towards numerics.data_shards=8", "lower mbs="),
        (("dp=8", "mbs=1"), "lower seq=", "towards numerics.data_shards"),
        (("numerics=stock", "mbs=4"), "lower mbs= or seq=", "towards numerics.data_shards"),
    ),
)
def test_a_run_that_does_not_fit_is_told_what_lowers_its_memory(overrides, says, says_not):
    config = composed_config("gbs=8", *overrides)
    ways = "; ".join(room._ways(config, memory.estimate(config)))
    assert says in ways
    assert says_not not in ways


def config_of(*overrides, model="qwen3_toy", device="cpu"):
    return composed(model, overrides, device=device).config


@pytest.mark.parametrize(
    "overrides, shards",
    (
        ((), 1), (("cp=4",), 4), (("cp=2", "numerics.context_shards=4"), 4), (("numerics=stock",), None),
    ),
)  # fmt: skip
def test_the_default_is_cp(overrides, shards):
    result = config_of(*overrides)
    assert result.numerics.context_shards == shards
    assert identity(result, None).get(CONTEXT_SHARDS) == shards


def test_a_rank_keeps_a_gradient_of_each_shard():
    of_gradients = [
        memory.estimate(config_of(f"cp={cp}", "numerics.context_shards=4")).parts[GRADIENTS] for cp in (1, 2, 4)
    ]
    assert of_gradients[0] == 2 * of_gradients[1] == 4 * of_gradients[2]


def _header(*overrides):
    return Header(identity=identity(config_of(*overrides), None))


def test_runs_of_other_shards_are_not_comparable_and_the_key_is_named():
    first, second, stock = _header(), _header("numerics.context_shards=2"), _header("numerics=stock")
    assert [difference.field for difference in identity_differences(first, second)] == [CONTEXT_SHARDS]
    assert identity_differences(second, stock) == ()
    message = verdict_line(compare(ledger(header=first), ledger(header=second)))
    assert message.endswith("numerics.context_shards is 1 and 2; train both with numerics.context_shards=2")


def _zigzag(length, ranks, rank):
    """As Megatron cuts a sequence."""
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


@pytest.mark.parametrize("cp", (1, 2, 4))
def test_at_c_equal_to_cp_the_cut_is_megatrons(cp):
    for rank in range(cp):
        assert torch.equal(data_shards.positions(32, cp, cp, rank), _zigzag(32, cp, rank))


@pytest.mark.parametrize("cp", (1, 2, 4))
def test_a_rank_holds_consecutive_shards(cp):
    whole = torch.cat([_zigzag(32, 4, shard) for shard in range(4)])
    assert torch.equal(torch.cat([data_shards.positions(32, 4, cp, rank) for rank in range(cp)]), whole)
    assert whole.sort().values.tolist() == list(range(32))


@pytest.mark.parametrize("cp", (1, 2, 4))
def test_a_trace_places_them_so(cp):
    for rank in range(cp):
        parts = Site(None, 32, 1, 1, cp=cp, cp_rank=rank, context_shards=4).positions(split=False)
        results = [position for first, count in parts for position in range(first, first + count)]
        assert results == data_shards.positions(32, 4, cp, rank).tolist()


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
