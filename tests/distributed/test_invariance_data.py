"""One ledger for every dp, micro-batch size and placement of experts at a fixed number of data shards, end to end.

The rows of GROUPS and LONGER are chosen so that each pair of values (tp, dp, mbs, distributed optimizer, overlap, ep)
that fits on few ranks occurs in some row of some model. `stock` is the control, from equal weights.
"""

import pytest

from tests.distributed.one_ledger import agree, train
from tests.distributed.test_invariance_experts import small
from tp_invariant_recipes.ledger.open import read

DENSE = ("qwen3_toy", "seq=32", "model.num_layers=1")
MODELS = {"dense": DENSE, "experts": small("qwen3_moe_toy"), "hybrid": small("nemotron3_nano_toy")}

APART = "optimizer.use_distributed_optimizer=true"  # weights and optimizer state of their own on every rank
BUCKETS = "ddp.overlap_grad_reduce=true ddp.bucket_size=20000"  # several buckets a rank
GATHER = f"{APART} {BUCKETS} ddp.overlap_param_gather=true optimizer.overlap_param_gather=true"

# Model -> layouts that have the ledger of ALONE: all shards on one rank.
ALONE = "mbs=4"
FIXED = "iters=2 gbs=4 numerics.data_shards=4"
GROUPS = {
    "dense": (f"dp=4 {GATHER}", f"tp=2 sp=false dp=2 mbs=2 {BUCKETS}"),
    "experts": (f"tp=2 dp=2 ep=4 mbs=2 {BUCKETS}",),
}
LONGER = {
    "dense": (
        "",
        "mbs=2",
        "dp=2",
        "dp=4",
        "dp=4 pp=2",
        f"dp=2 pp=2 mbs=2 {GATHER}",
        f"tp=4 dp=2 {BUCKETS}",
        f"tp=2 dp=4 {GATHER}",
        f"tp=2 sp=false dp=4 {APART}",
    ),
    "experts": (
        "",
        "dp=2 ep=2",
        f"dp=4 ep=4 {GATHER}",
        "tp=2 ep=2 dp=4",
        f"tp=2 dp=4 ep=8 {GATHER}",
        f"dp=4 ep=2 {BUCKETS}",
        f"tp=4 dp=2 ep=2 {APART}",
        f"dp=2 ep=2 pp=2 {GATHER}",
    ),
    "hybrid": (
        "",
        "dp=2 ep=2",
        "dp=4 ep=2",
        f"dp=4 {GATHER}",
        f"tp=2 dp=2 {GATHER}",
        f"tp=2 dp=4 ep=4 {BUCKETS}",
        f"tp=2 dp=2 ep=4 {APART}",
    ),
}
MANY = ("iters=2 gbs=16 numerics.data_shards=16", ("mbs=8", "dp=8", f"dp=16 {GATHER}", "dp=2 mbs=4"))


def _train(tpi, model, fixed, layout, run, **before):
    return train(tpi, (*MODELS[model], fixed, layout), run, **before)


@pytest.fixture(scope="module")
def alone(shared):
    """The ledger of the dense model on one rank."""
    return _train(shared, "dense", FIXED, ALONE, "alone")


@pytest.mark.timeout(1200)
def test_one_ledger_for_all_layouts_of_experts(tpi):
    agree(tpi, (*MODELS["experts"], FIXED), (ALONE, *GROUPS["experts"]))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", GROUPS["dense"])
def test_one_ledger_for_all_layouts_of_a_dense_model(tpi, alone, layout):
    assert _train(tpi, "dense", FIXED, layout, "other") == alone


@pytest.mark.release
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("model", LONGER)
def test_one_ledger_for_more_layouts(tpi, model):
    stages = "model.num_layers=2" if model == "dense" else ""
    agree(tpi, (*MODELS[model], "iters=3 gbs=8 numerics.data_shards=4", stages), LONGER[model])


@pytest.mark.release
@pytest.mark.timeout(2400)
def test_one_ledger_for_sixteen_ranks(tpi):
    fixed, layouts = MANY
    agree(tpi, (*MODELS["dense"], fixed), layouts)


@pytest.mark.parametrize("layout", ("dp=4", pytest.param("mbs=4", marks=pytest.mark.release)))
def test_stock_does_not(tpi, layout):
    fixed = "numerics=stock numerics.initial_weights=invariant iters=2 gbs=4"
    first, other = (_train(tpi, "dense", fixed, at, run) for at, run in (("", "one"), (layout, "other")))
    one, two = (read(tpi.folder / run).header.initial for run in ("one", "other"))
    assert one
    assert one == two
    assert [step.gradients for step in first] != [step.gradients for step in other]
    assert tpi("compare", "one", "other").status == 1


def _in_the_library() -> None:
    """Let the collectives add."""
    import torch.distributed as dist

    from tp_invariant_recipes.numerics.sums import bucket_reduction

    bucket_reduction.all_reduce = lambda partials, group, cp, copies=1: dist.all_reduce(partials[0], group=group)


def _one_after_the_other() -> None:
    """Let a rank add its shards in order, without a tree."""
    from tp_invariant_recipes.numerics.sums import data_shards

    original = data_shards.ShardCounter.__init__
    data_shards.ShardCounter.__init__ = lambda self, shards, each, gradients: original(
        self, 1, shards * each, gradients
    )


def _rows_one_by_one() -> None:
    """Let the embedding add a sequence's rows one after the other to what the sequence before left."""
    from tp_invariant_recipes.numerics.layers import embedding

    embedding.is_leaf = lambda weight: False


def _dealt_in_turn() -> None:
    """Leave the order of the data to Megatron."""
    _without("build_pretraining_data_loader")


def _losses_by_the_library() -> None:
    _without("get_forward_backward_func")


def _without(target: str) -> None:
    from tp_invariant_recipes.numerics.megatron import spec

    original = spec.replacements
    spec.replacements = lambda numerics: tuple(r for r in original(numerics) if not r.target.endswith(target))


def _norms_too_late() -> None:
    """Reduce a bucket without what its norms wait for, which is added at the end of the backward pass."""
    from tp_invariant_recipes.numerics.megatron import data_parallel

    data_parallel.partial_gradient.finish_all = lambda: None


# Each with a layout that shows it. The other layouts of a group do without: there the ingredient does nothing.
INGREDIENTS = {
    "tree over ranks": (_in_the_library, "dp=4"),
    "tree over the shards of a rank": (_one_after_the_other, "dp=1"),
    "order of the data": (_dealt_in_turn, "dp=2"),
    "norms before their bucket": (_norms_too_late, f"dp=4 {BUCKETS}"),
}


@pytest.mark.parametrize(
    "ingredient",
    [pytest.param(name, marks=[pytest.mark.release] * name.startswith("norms")) for name in INGREDIENTS],
)
def test_each_ingredient_is_needed(tpi, alone, ingredient):
    plant, layout = INGREDIENTS[ingredient]
    assert _train(tpi, "dense", FIXED, layout, "without", before=plant) != alone


@pytest.mark.parametrize("tied", ("true", pytest.param("false", marks=pytest.mark.release)))
def test_the_sum_of_a_sequences_rows_is_needed(tpi, tied):
    """Sequences have tokens twice, in fp32: numbers of bf16 add exactly in any order."""
    fixed = f"{FIXED} model.vocab_size=24 precision=fp32 model.share_embeddings_and_output_weights={tied}"
    runs = {"ranks": ("dp=4", None), "pairs": ("dp=1", None), "without": ("dp=1", _rows_one_by_one)}
    ranks, pairs, without = [
        _train(tpi, "dense", fixed, layout, run, before=before) for run, (layout, before) in runs.items()
    ]
    assert pairs == ranks
    table = "embedding.word_embeddings.weight"
    assert without[0].gradients[table] != ranks[0].gradients[table]
    others = [{name: of for name, of in one[0].gradients.items() if name != table} for one in (without, ranks)]
    assert others[0] == others[1]


@pytest.mark.release
def test_the_tree_of_losses_is_needed(tpi):
    """Bridge's own sums differ in the last bit, at some steps."""
    fixed = "iters=8 gbs=8 numerics.data_shards=4"
    for name, layout in (("one", "dp=1"), ("several", "dp=4")):
        _train(tpi, "dense", fixed, layout, name, before=_losses_by_the_library)
    assert tpi("compare", "one", "several").status == 1


@pytest.mark.release
def test_verify_takes_the_largest_dp(tpi):
    """And without it, two runs with a rank for each shard are not comparable, which names the key."""
    done = tpi("verify", *DENSE, "iters=1", "gbs=4", "dp=1,2", "--dir", "cells")
    assert done.status == 0, done.stdout + done.stderr
    assert {read(tpi.folder / "cells" / cell).header.numerics["data_shards"] for cell in ("dp1", "dp2")} == {2}
    _train(tpi, "dense", "iters=1 gbs=4", "dp=1", "single")
    compared = tpi("compare", "single", "cells/dp1")
    assert compared.status == 2
    assert "numerics.data_shards is 1 and 2; train both with numerics.data_shards=2" in compared.stdout
