"""Muon under `numerics=tree`: one ledger for every layout, with the momentum, and checkpoints that go on in another."""

import pytest

from tests.distributed.faults import without
from tests.distributed.scenario import agree, stock_differs, unequal
from tests.distributed.small_models import DENSE, small

pytestmark = [pytest.mark.release, pytest.mark.timeout(1200)]

MUON = "optimizer.optimizer=muon optimizer.muon_tp_mode=duplicated ledger.state_digests=1"
LAYER_WISE = "optimizer.use_layer_wise_distributed_optimizer=true"
SHARED = "gbs=4 numerics.data_shards=2"
EXPERTS = "numerics.virtual_shards=4"

# Model, what is held fixed, the layouts that must agree, with digests of all gradients, momenta and weights.
ROWS = (
    (DENSE, "iters=2 gbs=1", ("tp=1", "tp=2")),
    (DENSE, f"iters=2 {SHARED}", ("dp=1", "dp=2", f"dp=2 {LAYER_WISE}")),
    (
        DENSE,
        f"iters=2 {SHARED} model.num_layers=2 optimizer.muon_nesterov=true",
        ("tp=1", "pp=2", f"dp=2 tp=2 {LAYER_WISE}", "tp=4 sp=false"),
    ),
    (DENSE, "iters=2 gbs=1 precision=fp32", ("tp=1", "tp=2")),
    (DENSE, "iters=2 gbs=1 numerics=gather", ("tp=1", "tp=2")),
    *(
        (small(model), f"iters=2 {SHARED} {EXPERTS}", ("tp=1", *layouts, f"dp=2 ep=2 {LAYER_WISE}"))
        for model, *layouts in (
            ("qwen3_moe_toy", "tp=2 ep=2", f"dp=2 tp=2 {LAYER_WISE}"),
            ("deepseek_v3_toy", "tp=2 ep=2"),
        )
    ),
    (small("nemotron3_nano_toy"), f"iters=2 {EXPERTS}", ("tp=1", "tp=2 ep=2", "pp=2")),
)


@pytest.mark.parametrize("model, fixed, layouts", ROWS)
def test_one_ledger_for_all_layouts(scenario, model, fixed, layouts):
    agree(scenario(model, MUON, fixed), layouts)
    moments = scenario(model, MUON, fixed, layouts[0]).ledger()[-1].moments
    assert {name.partition("/")[0] for name in moments} == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}


@pytest.mark.parametrize("mode", ("blockwise", "duplicated", "distributed"))
def test_stock_does_not(scenario, mode):
    stock_differs(scenario(DENSE, MUON, f"iters=1 gbs=1 optimizer.muon_tp_mode={mode}"), ("tp=1", "tp=2"))


def test_muon_of_whole_matrices_is_megatrons_own_at_tp_1(scenario):
    muon = scenario(DENSE, MUON, "iters=2 gbs=1 tp=1")
    assert unequal(muon.ledger(), muon.planted(without("_create_emerging_optimizer")).ledger()) == []


# Model, the layout that saves, the one that goes on, or what is said instead.
RESUMED = (
    (DENSE, "tp=2", f"tp=1 dp=2 {LAYER_WISE}", None),
    (DENSE, f"dp=2 {LAYER_WISE}", "dp=1 pp=1 optimizer.use_layer_wise_distributed_optimizer=false", None),
    (small("qwen3_moe_toy"), "tp=2 ep=2", "tp=1 ep=1", None),
    (small("qwen3_moe_toy"), f"tp=2 ep=2 {LAYER_WISE}", "tp=1 dp=2", None),
    (
        small("qwen3_moe_toy"),
        f"dp=2 ep=2 {LAYER_WISE}",
        "optimizer.use_layer_wise_distributed_optimizer=false",
        "it holds the state of experts with all other state; optimizer.use_layer_wise_distributed_optimizer=true",
    ),
)


@pytest.mark.parametrize("model, first, then, says", RESUMED)
def test_a_checkpoint_goes_on_in_another_layout(tpi, model, first, then, says):
    words = (*f"{model} {MUON} {SHARED} numerics.virtual_shards=4 iters=4 save=2".split(),)
    tpi("train", *words, *first.split(), "train.exit_interval=2", "run.dir=run", status=0)
    goes_on = ("train", "--resume", "run", *then.split(), "train.exit_interval=null")
    if says is not None:
        assert says in tpi(*goes_on, status=2).stderr
        return
    tpi(*goes_on, status=0)
    tpi("train", *words, "run.dir=whole", status=0)
    assert tpi("compare", "run", "whole", status=0).stdout.startswith("identical: 4 steps")
