"""`numerics=tree` and `gather`: one ledger for every tensor-parallel degree, end to end. `stock` is the control."""

import pytest

from tests.distributed.faults import without
from tests.distributed.scenario import agree, stock_differs
from tests.distributed.small_models import RECOMPUTED
from tests.rules import allow

# Two micro-batches a step, so that gradients are added up over them, unless a row says otherwise.
SMALL = "qwen3_toy seq=32 gbs=2"

UNTIED = "model.share_embeddings_and_output_weights=false"

FOUR = "model.num_layers=4"
INTERLEAVED = "model.virtual_pipeline_model_parallel_size=2"
FIRST, LAST = (f"model.num_layers_in_{end}_pipeline_stage=1" for end in ("first", "last"))
ACCOUNTED = "model.account_for_embedding_in_pipeline_split=true model.account_for_loss_in_pipeline_split=true"
OVERLAPPING = "model.overlap_p2p_comm=true model.batch_p2p_comm=false"
IN_A_BATCH = "model.overlap_p2p_comm=false model.batch_p2p_comm=true"

MASK = "dataset.create_attention_mask=true"  # Megatron's default; nobody reads it

# What is held fixed -> the layouts that must agree, with digests of all gradients and weights at every step. Sequence
# parallelism is on where tp > 1 unless said otherwise. dp and micro-batches: test_invariance_data.py.
GROUPS = {
    "iters=2 gbs=1 model.num_layers=1": ("tp=1", "tp=2"),
    f"iters=1 precision=fp32 {FOUR}": ("tp=1", f"pp=2 {INTERLEAVED} {MASK}"),
}
# More of the same, for a release: on two cores, a step of eight ranks takes a second.
LONGER = {
    "iters=2 gbs=1 model.num_layers=1": ("tp=1", "tp=4"),
    f"iters=1 precision=fp32 {FOUR}": ("tp=1", f"tp=2 pp=2 {INTERLEAVED} {MASK}"),
    f"iters=2 precision=fp32 numerics.virtual_shards=4 {UNTIED} {RECOMPUTED}": ("tp=1", "tp=4 sp=false", "pp=2"),
    "iters=2 mbs=2 seq=64": ("tp=1", f"tp=2 sp=false {MASK}", "tp=4"),
    "iters=50 gbs=1": ("tp=1", "tp=2", "tp=4", "tp=8"),
    "iters=2 gbs=4 mbs=4": ("tp=1", "tp=2", "tp=2 sp=false", "tp=4", "tp=4 sp=false", "tp=8"),
    "iters=2 gbs=4 dp=2": ("tp=1", "tp=2", "tp=4", "tp=8"),
    "iters=2 gbs=4 pp=2": ("tp=1", "tp=2", "tp=4", "tp=8"),
    "iters=2 gbs=8 dp=2": ("tp=1", "pp=2", "tp=2 pp=2"),
    "iters=2 gbs=4": ("tp=1", "tp=1 pp=2", "tp=2 pp=2"),
    f"iters=2 gbs=4 {UNTIED}": ("tp=1", "tp=2 pp=2"),
    f"iters=2 gbs=8 {FOUR}": ("tp=1", "pp=4", f"pp=2 {LAST}", f"pp=3 {FIRST} {LAST}", f"pp=3 {ACCOUNTED}"),
    f"iters=2 gbs=8 {FOUR} {UNTIED}": ("tp=1", "pp=4", f"pp=2 {INTERLEAVED}", f"tp=2 pp=3 {FIRST} {LAST}"),
    "iters=2 gbs=8 model.num_layers=8": ("tp=1", f"pp=4 {INTERLEAVED}", f"pp=4 tp=2 {INTERLEAVED} {OVERLAPPING}"),
    f"iters=2 {RECOMPUTED}": ("tp=1", "tp=2", "tp=4 sp=false"),
    "iters=2 precision=fp32": ("tp=1", "tp=4 sp=false"),
    f"iters=2 {UNTIED}": ("tp=1", "tp=4", "pp=2"),
    f"iters=2 gbs=4 {FOUR}": ("tp=1", f"tp=2 pp=2 {INTERLEAVED}", f"pp=2 {FIRST}"),
    "iters=2 numerics.virtual_shards=4": ("tp=1", "tp=4"),
}
ROWS = (*GROUPS.items(), *(pytest.param(*row, marks=pytest.mark.release) for row in LONGER.items()))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fixed, layouts", ROWS)
def test_one_ledger_for_all_layouts(scenario, fixed, layouts):
    agree(scenario(SMALL, fixed), layouts)


@pytest.mark.parametrize(
    "layouts",
    (
        ("tp=1", "tp=2 sp=false"),
        pytest.param(("tp=1", "tp=2", "tp=4", "tp=4 sp=false"), marks=pytest.mark.release),
    ),
)
def test_gather_has_one_ledger_for_all_layouts(scenario, layouts):
    agree(scenario(SMALL, "numerics=gather iters=1 model.num_layers=1"), layouts)


@pytest.mark.parametrize(
    "fixed, layouts",
    (
        ("iters=1 model.num_layers=1", ("tp=1", "tp=2")),
        pytest.param("iters=1 pp=2", ("tp=1", "tp=2"), marks=pytest.mark.release),
        pytest.param("iters=1 precision=fp32 model.num_layers=1", ("tp=1", "tp=2"), marks=pytest.mark.release),
        ("iters=1", ("tp=1", "tp=1 pp=2")),
    ),
)
def test_stock_does_not(scenario, fixed, layouts):
    stock_differs(scenario(SMALL, fixed), layouts)


# What a family adds to Qwen3: scaled rotary frequencies, biases of queries, keys and values.
FAMILIES = ("llama32_toy", "qwen25_toy")
SHORTEST, BOTH = "seq=32 gbs=1 iters=1 model.num_layers=1", ("tp=1", "tp=2")


@pytest.mark.release
@pytest.mark.parametrize("model", FAMILIES)
def test_one_ledger_for_every_family(scenario, model):
    family = scenario(model, SHORTEST)
    agree(family, BOTH)
    assert "product" not in family("tp=1").header().device  # the definition on a CPU has no name


@pytest.mark.release
@pytest.mark.parametrize("model", FAMILIES)
def test_stock_has_another_for_every_family(scenario, model):
    stock_differs(scenario(model, SHORTEST), BOTH)


def _without_the_rule() -> None:
    allow("two interleaved stages take each other's messages for their own")


@pytest.mark.release
def test_two_interleaved_stages_in_a_batch_take_each_others_messages(scenario):
    """The control of the rule that refuses this: without it the loss is another one."""
    single = scenario(SMALL, "iters=1 gbs=4", FOUR)
    compared = single.compared(single(f"pp=2 {INTERLEAVED} {IN_A_BATCH}").planted(_without_the_rule), status=1)
    assert "loss" in compared.stdout.splitlines()[0]


REFUSED = {
    f"pp=2 {FOUR} {INTERLEAVED} {IN_A_BATCH}": "two interleaved stages take each other's messages for their own",
    "model.hidden_dropout=0.1": "dropout draws other numbers in every layout",
    "model.normalization=L2Norm": "of norms only RMSNorm and LayerNorm are covered",
    "model.ffn_hidden_size=192": "on a CPU it must be a multiple of 256",
    "dp=3 gbs=6": "dp=3: the tree over data-parallel ranks needs a power of two; the largest that fits gbs=6 is dp=2",
    "gbs=12 numerics.data_shards=8": "the largest that fits is numerics.data_shards=4",
    "numerics.virtual_shards=6": "must be a power of two",
    "numerics.virtual_shards=16": "the largest that fits is numerics.virtual_shards=8",
    "numerics.virtual_shards=2 tp=4": "tp=4 does not divide numerics.virtual_shards=2",
}


# The rules, one by one: tests/unit/check/invariant/test_config_invariance.py.
@pytest.mark.parametrize(
    "override", [pytest.param(row, marks=[pytest.mark.release] * (n > 1)) for n, row in enumerate(REFUSED)]
)
def test_what_is_not_covered_is_refused(tpi, override):
    refused = tpi("train", "qwen3_toy", "numerics=tree", *override.split(), "run.dir=run", status=2)
    assert REFUSED[override] in refused.stderr
    assert not (tpi.folder / "run").exists()


def _stock_weights() -> None:
    from tp_invariant_recipes.numerics.megatron import init

    init.initialise = lambda chunks, *, seed: chunks


def _adding_in_rank_order() -> None:
    import torch.distributed as dist

    from tp_invariant_recipes.numerics.layers.formats import plain
    from tp_invariant_recipes.numerics.sums import tree

    def start(partials, mesh):
        node = tree.tree_sum(partials)
        if mesh.size > 1:
            dist.all_reduce(node, group=mesh.group)
        return tree.Reducing(tree.Moving(node.chunk(mesh.size)[mesh.rank].unsqueeze(0)))

    plain.start_reduce_scatter = start


# Each with the layout that shows it: two ranks add in one order only. What changes the last bits of a gradient and no
# more shows in a ledger after many steps; numerics/test_block.py looks at the gradients themselves.
INGREDIENTS = {
    "cross entropy": (without("vocab_parallel_cross_entropy"), "tp=2"),
    "output layer": (without("ColumnParallelLinear"), "tp=2"),
    "gradient norm": (without("get_grad_norm_fp32", "ChainedOptimizer.get_grad_norm"), "tp=2"),
    "initial weights": (_stock_weights, "tp=2"),
    "tree order across ranks": (_adding_in_rank_order, "tp=4 sp=false"),
}


@pytest.mark.release  # in `make test`: tests of their sums in numerics/
@pytest.mark.parametrize("ingredient", INGREDIENTS)
def test_each_ingredient_is_needed(scenario, ingredient):
    plant, layout = INGREDIENTS[ingredient]
    single, several = (
        scenario(SMALL, "seq=64 iters=2 model.num_layers=1", at).planted(plant) for at in ("tp=1", layout)
    )
    single.compared(several, status=1)
