"""`numerics=tree` and `gather`: one ledger for tp, pp, dp and cp, end to end. `stock` is the control."""

import pytest
import torch

from tests.distributed.scenario import agree, stock_differs, unequal
from tests.distributed.small_models import GATHER, RECOMPUTED, SHORTEST
from tests.rules import allow
from tp_invariant_recipes.ledger.bits import bits_float
from tp_invariant_recipes.ledger.schema import DIGESTED

UNTIED = "model.share_embeddings_and_output_weights=false"
FOUR = "model.num_layers=4"
INTERLEAVED = "model.virtual_pipeline_model_parallel_size=2"
FIRST, LAST = (f"model.num_layers_in_{end}_pipeline_stage=1" for end in ("first", "last"))
ACCOUNTED = "model.account_for_embedding_in_pipeline_split=true model.account_for_loss_in_pipeline_split=true"
OVERLAPPING = "model.overlap_p2p_comm=true model.batch_p2p_comm=false"
IN_A_BATCH = "model.overlap_p2p_comm=false model.batch_p2p_comm=true"
MASK = "dataset.create_attention_mask=true"  # Megatron's default; nobody reads it

# All layouts of `make test` have the ledger of one run: a step of four sequences, four layers for interleaved stages.
DENSE = f"qwen3_toy seq=32 gbs=4 {FOUR} numerics.virtual_shards=4 model.add_qkv_bias=true"
SHARDS = "iters=2 numerics.data_shards=4 numerics.context_shards=2"
VALIDATED = "validation.eval_iters=1 validation.eval_interval=1"
ALONE = "mbs=4"
LAYOUTS = (f"tp=2 {MASK}", f"pp=2 mbs=2 {INTERLEAVED}", f"dp=2 {GATHER} {VALIDATED}", f"cp=2 {GATHER} {VALIDATED}")
# Stock's runs differ in the order of additions alone.
STOCK_LAYOUTS = ("tp=2 mbs=4", "pp=2 mbs=4", "dp=2 mbs=2", "cp=2 mbs=4")

# More layouts and options, for a release. Sequence parallelism is on where tp > 1 unless a row says otherwise.
LONGER = {
    "iters=50 gbs=1": ("tp=1", "tp=2", "tp=4", "tp=8"),
    "iters=2 gbs=4 mbs=4": ("tp=1", "tp=2", "tp=2 sp=false", "tp=4", "tp=4 sp=false", "tp=8"),
    "iters=2 gbs=4 dp=2": ("tp=1", "tp=8"),
    "iters=2 gbs=4 pp=2": ("tp=1", "tp=8"),
    f"iters=2 gbs=8 {FOUR}": (
        *("tp=1", "pp=4", f"pp=2 {FIRST}", f"pp=2 {LAST}", f"pp=3 {FIRST} {LAST}", f"pp=3 {ACCOUNTED}"),
        f"tp=2 pp=2 {INTERLEAVED}",
    ),
    f"iters=2 gbs=8 {FOUR} {UNTIED}": ("tp=1", "pp=4", f"pp=2 {INTERLEAVED}", f"tp=2 pp=3 {FIRST} {LAST}"),
    "iters=2 gbs=8 model.num_layers=8": ("tp=1", f"pp=4 {INTERLEAVED}", f"pp=4 tp=2 {INTERLEAVED} {OVERLAPPING}"),
    f"iters=2 {RECOMPUTED}": ("tp=1", "tp=2", "tp=4 sp=false"),
    f"iters=2 precision=fp32 {FOUR}": ("tp=1", "tp=4 sp=false", f"pp=2 {INTERLEAVED} {MASK}"),
    f"iters=2 precision=fp32 {UNTIED} {RECOMPUTED}": ("tp=1", "tp=4 sp=false", "pp=2"),
    "iters=1 numerics=gather": ("tp=1", "tp=2", "tp=4", "tp=4 sp=false"),
}


def test_one_ledger_for_all_layouts(scenario):
    """And validation, recorded after the step and after the training, leaves all else as it is."""
    dense = scenario(DENSE, SHARDS)
    agree(dense, (f"{ALONE} {VALIDATED}", *(layout for layout in LAYOUTS if VALIDATED in layout)))
    validated = dense(ALONE, VALIDATED).ledger()
    results = [list(step.evaluations) for step in validated]
    assert results == [["validation/0:4"], ["validation/4:8", "final_validation/8:12", "test/0:4"]]
    for layout in LAYOUTS:
        if VALIDATED not in layout:
            assert unequal(dense(layout).ledger(), validated) == ["step 1: evaluations", "step 2: evaluations"], layout
    assert "product" not in dense(ALONE, VALIDATED).header().device  # the definition on a CPU has no name


def test_how_often_digests_are_taken_changes_nothing_else(scenario):
    """Also the norm of a step without them, after one that was told the largest gradient by their kernel."""
    run = scenario(SHORTEST, "iters=3 ledger.state_digests=0")
    every, each_other, none = (run(f"ledger.digests={often}").ledger() for often in (1, 2, 0))
    for other in (each_other, none):
        assert {where.split(": ")[1] for where in unequal(other, every)} <= {*DIGESTED}
    assert unequal(each_other[1:2], every[1:2]) == []
    assert {name.partition("/")[0] for name in every[-1].moments} == {"exp_avg", "exp_avg_sq", "step"}


def _turned_positions():
    """Give tokens the positions of a sequence that nobody cut."""
    from tp_invariant_recipes.numerics.megatron.attention import core_attention

    core_attention._held = lambda length, *_: torch.arange(length)


def _tokens_as_they_lie():
    """Give attention its tokens shard by shard."""
    from tp_invariant_recipes.numerics.layers import attention

    attention._heads = attention._tokens = lambda x, exchange: x.clone()


def test_context_shards_compute_what_a_whole_sequence_does(scenario):
    """But for rounding, which fp32 keeps small. What is wrong at every cp alike leaves the ledgers of layouts equal."""
    run = scenario("qwen3_toy seq=32 gbs=1 iters=1 precision=fp32 model.num_layers=1 cp=1")
    cut = run("numerics.context_shards=2")
    whole, *others = (
        each.ledger()[0] for each in (run, cut, *map(cut.planted, (_turned_positions, _tokens_as_they_lie)))
    )
    losses = [bits_float(step.loss) / bits_float(whole.loss) - 1 for step in others]
    norms = [bits_float(step.grad_norm) / bits_float(whole.grad_norm) - 1 for step in others]
    assert [abs(value) < 1e-6 for value in losses] == [True, False, False], losses
    assert [abs(value) < 1e-5 for value in norms] == [True, False, False], norms


@pytest.mark.parametrize("layout", STOCK_LAYOUTS)
def test_stock_does_not(scenario, layout):
    stock_differs(scenario(DENSE, "iters=1"), (ALONE, layout))


def test_gather_has_one_ledger_for_all_layouts(scenario):
    """`sp=false`, unlike tree's layout."""
    agree(scenario(SHORTEST, "numerics=gather"), ("tp=1", "tp=2 sp=false"))


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fixed, layouts", LONGER.items())
def test_one_ledger_for_more_layouts(scenario, fixed, layouts):
    agree(scenario("qwen3_toy seq=32 gbs=2", fixed), layouts)


@pytest.mark.release
def test_stock_does_not_in_fp32(scenario):
    stock_differs(scenario("qwen3_toy seq=32 gbs=2 iters=1 precision=fp32 model.num_layers=1"), ("tp=1", "tp=2"))


def _without_the_rule() -> None:
    allow("two interleaved stages take each other's messages for their own")


@pytest.mark.release
def test_two_interleaved_stages_in_a_batch_take_each_others_messages(scenario):
    """The control of the rule that refuses this: without it the loss is another one."""
    single = scenario("qwen3_toy seq=32 iters=1 gbs=4", FOUR)
    compared = single.compared(single(f"pp=2 {INTERLEAVED} {IN_A_BATCH}").planted(_without_the_rule), status=1)
    assert "loss" in compared.stdout.splitlines()[0]
