"""Every family of models under `numerics=tree`: one ledger for all layouts, the model that Bridge has, its controls."""

import json

import pytest

from tests.distributed.layouts.families import (
    AHEAD,
    GPT,
    MODELS,
    NEXT,
    NEXT_ALONE,
    ROWS,
    STOCK_ROWS,
)
from tests.distributed.runs.test_checkpoints_interchange import _tensors as tensors_of
from tests.distributed.scenario import STOCK, agree, stock_differs, unequal
from tests.distributed.small_models import RECOMPUTED
from tests.operands import same_bits
from tp_invariant_recipes.ledger.bits import bits_float

pytestmark = [pytest.mark.release, pytest.mark.timeout(1200), pytest.mark.usefixtures("families")]


@pytest.mark.parametrize("model, fixed, layouts", ROWS)
def test_one_ledger_for_all_layouts(scenario, model, fixed, layouts):
    agree(scenario(MODELS[model], "iters=2", fixed), layouts)


@pytest.mark.parametrize("model, fixed, layouts", STOCK_ROWS)
def test_stock_does_not(scenario, model, fixed, layouts):
    message = stock_differs(scenario(MODELS[model], "iters=1", fixed), layouts)
    assert "different at step 1" in message


IN_FP32 = "gbs=1 iters=1 tp=1 precision=fp32"


@pytest.mark.parametrize("model", ("gemma3", "gpt", "next", "olmoe"))
def test_the_model_is_bridges(scenario, model):
    """The invariant layers compute what Bridge's compute, to rounding: losses of step 1 and its gradient norms."""
    alone = scenario(MODELS[model], IN_FP32)
    (tree,), (stock,) = alone.ledger(), alone(STOCK).ledger()
    assert bits_float(tree.loss) == pytest.approx(bits_float(stock.loss), rel=1e-5)
    assert bits_float(tree.grad_norm) == pytest.approx(bits_float(stock.grad_norm), rel=1e-4)
    assert bits_float(tree.grad_norm) > 0.0
    assert tree.gradients.keys() == stock.gradients.keys()


def test_without_the_patch_stock_does_not_train_biased_experts(tpi):
    words = (*MODELS["gpt_oss"].split(), "gbs=1", "iters=1", "numerics=stock")
    ended = tpi("train", *words, "patches.off=[core-expert-bias]", "run.dir=off", status=2)
    assert "is a view and is being modified inplace" in ended.stderr
    tpi("train", *words, "run.dir=on", status=0)


def test_padded_sequences_are_scored_and_longer_ones_refused(tpi):
    """Scoring pads to more tokens than there are learned positions."""
    tpi("train", *GPT.split(), "gbs=1", "iters=1", "save=1", "run.dir=run", status=0)
    for name, length in (("fits", 32), ("longer", 33)):
        rows = [{"tokens": [*range(count)]} for count in (5, length)]
        (tpi.folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for tp in (1, 2):
        tpi("score", "run", "fits.jsonl", f"tp={tp}", "--out", f"tp{tp}.scores", status=0)
    first, second = ((tpi.folder / f"tp{tp}.scores").read_bytes() for tp in (1, 2))
    assert first == second
    output = tpi("score", "run", "longer.jsonl", "--out", "longer.scores", status=2).stderr
    assert "a sequence has 33 tokens, and the model has learned 32 positions; leave longer ones out" in output


def test_the_order_of_layers_counts(scenario):
    """The dense layer is where `model.moe_layer_freq` has it, under stock numerics too."""
    model = scenario(MODELS["glm"], "gbs=1 iters=1")
    names, stock = (
        {name for name in item.ledger()[0].gradients if name.startswith("decoder.layers.")}
        for item in (model, model(STOCK, "tp=1"))
    )
    assert "decoder.layers.0.mlp.linear_fc1.weight" in names
    assert "decoder.layers.1.mlp.router.weight" in names
    assert stock == names


def test_the_loss_of_a_batch_counts_the_sequences_before(scenario):
    """With one sequence it is that of a sequence; the second one's gradients know of the first one."""
    first, second = (scenario(NEXT, NEXT_ALONE, f"gbs={gbs} iters=1 model.moe_aux_loss_coeff=1.0") for gbs in (1, 2))
    of_each = "model.moe_router_load_balancing_type=seq_aux_loss"
    assert first.ledger()[0].gradients == first(of_each).ledger()[0].gradients
    assert second.ledger()[0].gradients != second(of_each).ledger()[0].gradients


def test_checkpoints_of_delta_nets_go_to_stock_and_back(tpi):
    """Under the same names; stock at tp=2 continues with the weights that tree has saved at tp=1."""
    words = ("train", *f"{NEXT} gbs=1 iters=1 save=1".split())
    tpi(*words, "run.dir=tree", status=0)
    still = ("optimizer.lr=0", "optimizer.min_lr=0", "tp=2", "checkpoint.pretrained_checkpoint=tree/checkpoints")
    tpi(*words, "numerics=stock", *still, "run.dir=stock", status=0)
    tree, stock = (tensors_of(tpi.folder / run / "checkpoints" / "iter_0000001") for run in ("tree", "stock"))
    assert tree.keys() == stock.keys()
    weights = [name for name in tree if not name.startswith("optimizer")]
    assert {f"decoder.layers.0.self_attention.in_proj.weight.{part}" for part in ("query", "z", "alpha")} < {*weights}
    assert [name for name in weights if not same_bits(tree[name], stock[name])] == []


def test_a_run_that_recomputes_layers_ahead_resumes(scenario, tpi):
    words = (
        f"qwen3_toy seq=32 model.num_layers=1 {AHEAD} iters=2 {RECOMPUTED} scheduler.lr_decay_iters=4 "
        "ledger.state_digests=1"
    )
    tpi("train", *words.split(), "tp=2", "save=2", "run.dir=run", status=0)
    tpi("train", "--resume", "run", "iters=4", status=0)
    assert unequal(tpi.ledger("run"), scenario(words, "iters=4").ledger()) == []
