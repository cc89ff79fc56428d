# SPDX-License-Identifier: Apache-2.0
"""`numerics=tree`: one ledger for tp, pp, dp and cp of a dense model, end to end. `stock` is the control.

What is beside the arithmetic of the layouts: validation, digests, resumes in another layout, and layers of families.
"""

import json
import shutil

import pytest
import torch

from tests.distributed.faults import without
from tests.distributed.layouts import rows
from tests.distributed.layouts.rows import (
    AHEAD,
    FIXED,
    FOUR_LAYERS,
    GPT,
    INTERLEAVED,
    LAYER_WISE,
    MASK,
    MODELS,
    MUON,
    NEXT,
    NEXT_ALONE,
    SHARED,
    STACKED,
    VALIDATED,
)  # fmt: skip
from tests.distributed.runs.test_checkpoints_interchange import _tensors as tensors_of
from tests.distributed.scenario import STOCK, agree, stock_differs, unequal
from tests.distributed.small_models import DENSE, GATHER, RECOMPUTED, SHORTEST, small
from tests.operands import same_bits
from tests.rules import allow
from tp_invariant_recipes.ledger.bits import bits_float
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.ledger.schema import DIGESTED

pytestmark = pytest.mark.timeout(1200)
MOE = small("qwen3_moe_toy")

# All layouts of `make test` have the ledger of one run: a step of four sequences, four layers for interleaved stages.
FOUR = f"qwen3_toy seq=32 gbs=4 {FOUR_LAYERS} numerics.virtual_shards=4 model.add_qkv_bias=true"
SHARDS = "iters=2 numerics.data_shards=4 numerics.context_shards=2"
ALONE = "mbs=4"
LAYOUTS = (f"tp=2 {MASK}", f"pp=2 mbs=2 {INTERLEAVED}", f"dp=2 {GATHER} {VALIDATED}", f"cp=2 {GATHER} {VALIDATED}")
# Stock's runs differ in the order of additions alone.
STOCK_LAYOUTS = ("tp=2 mbs=4", "pp=2 mbs=4", "dp=2 mbs=2", "cp=2 mbs=4")


def test_one_ledger_for_all_layouts(scenario):
    """And validation, recorded after the step and after the training, leaves all else as it is."""
    dense = scenario(FOUR, SHARDS)
    agree(dense, (f"{ALONE} {VALIDATED}", *(layout for layout in LAYOUTS if VALIDATED in layout)))
    validated = dense(ALONE, VALIDATED).ledger()
    results = [list(step.evaluations) for step in validated]
    assert results == [["validation/0:4"], ["validation/4:8", "final_validation/8:12", "test/0:4"]]
    for layout in LAYOUTS:
        if VALIDATED not in layout:
            assert unequal(dense(layout).ledger(), validated) == ["step 1: evaluations", "step 2: evaluations"], layout
    assert "product" not in dense(ALONE, VALIDATED).header().device  # the definition on a CPU has no name


def _reduced_early():
    """Reduce a bucket when its first gradient has come, not its last."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Buckets

    ready = Buckets.register_grad_ready

    def early(self, *args, **kwargs):
        ready(self, *args, **kwargs)
        if self.is_last_microbatch and self.grad_reduce_handle is None:
            self.start_grad_sync()

    Buckets.register_grad_ready = early


def test_a_bucket_waits_for_its_last_gradient(scenario):
    """The control: one that does not has another ledger."""
    run = scenario(SHORTEST, "iters=1 gbs=4 numerics.data_shards=2")
    agree(run, ("", f"dp=2 {GATHER}"))
    run("").compared(run(f"dp=2 {GATHER}").planted(_reduced_early), status=1)


def _stand_ins_of_nan():
    """Give autograd NaN for gradients that main_grad has already."""
    from tp_invariant_recipes.numerics.sums import weight_gradient

    added = weight_gradient.added_to_main_grad
    weight_gradient.added_to_main_grad = lambda weight: added(weight).clone().fill_(torch.nan)


def test_nobody_reads_what_stands_in_for_a_gradient(scenario):
    """Not of tied embeddings, either."""
    run = scenario(SHORTEST, "iters=2 gbs=4")("")
    assert unequal(run.ledger(), run.planted(_stand_ins_of_nan).ledger()) == []


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
    stock_differs(scenario(FOUR, "iters=1"), (ALONE, layout))


@pytest.mark.release
def test_two_interleaved_stages_in_a_batch_take_each_others_messages(scenario):
    """The control of the rule that refuses this: without it the loss is another one."""

    def without_the_rule() -> None:
        allow("two interleaved stages take each other's messages for their own")

    single = scenario("qwen3_toy seq=32 iters=1 gbs=4", FOUR_LAYERS)
    in_a_batch = f"pp=2 {INTERLEAVED} model.overlap_p2p_comm=false model.batch_p2p_comm=true"
    compared = single.compared(single(in_a_batch).planted(without_the_rule), status=1)
    assert "loss" in compared.stdout.splitlines()[0]


# --- validation ---


@pytest.mark.release
def test_stock_validates_on_other_sequences(scenario):
    """The control: two sequences of a step are added in one order, so training agrees, but validation does not."""
    stock = scenario(DENSE, STOCK, "iters=1 gbs=2", VALIDATED)
    assert unequal(stock("dp=1").ledger(), stock("dp=2").ledger()) == ["step 1: evaluations"]
    compared = stock("dp=1").compared(stock("dp=2"), status=1)
    assert "different at step 1: validation loss (validation/0:2) f32:" in compared.stdout


@pytest.mark.release
def test_a_resumed_run_validates_where_it_was(scenario, tpi):
    """In another layout, and longer than planned: the loss after its first end is not of the longer run."""
    fixed = scenario(DENSE, "gbs=4 numerics.data_shards=2 save=2 scheduler.lr_decay_iters=6", VALIDATED)
    whole, begun = fixed("iters=6"), fixed("iters=4")
    assert list(begun.ledger()[-1].evaluations) == ["validation/12:16", "final_validation/16:20", "test/0:4"]
    shutil.copytree(begun.run, tpi.folder / "begun")
    tpi("train", "--resume", "begun", "iters=6", "dp=2", status=0)
    assert unequal(read(tpi.folder / "begun").steps, whole.ledger()) == []


def _fail_after_the_test() -> None:
    """With the final validation in the ledger, and not the test."""
    from tp_invariant_recipes.observe.recorder import Recorder

    def failing(self, context):
        raise ValueError("planted")

    Recorder.on_test_end = failing


@pytest.mark.release
def test_a_run_that_failed_after_its_last_step_reevaluates(scenario, tpi):
    words = (*DENSE.split(), "iters=2", "gbs=2", "save=2", *VALIDATED.split())
    tpi("train", *words, "run.dir=failed", before=_fail_after_the_test, status=2)
    assert list(read(tpi.folder / "failed").steps[-1].evaluations) == ["validation/2:4", "final_validation/4:6"]
    tpi("train", "--resume", "failed", status=0)
    assert unequal(read(tpi.folder / "failed").steps, scenario(*words).ledger()) == []


@pytest.mark.release
@pytest.mark.parametrize("axis, shards, gbs", (("dp", "data_shards", 4), ("cp", "context_shards", 2)))
def test_verify_takes_the_largest_degree(scenario, tpi, axis, shards, gbs):
    """And without it, two runs with a rank for each shard are not comparable, which names the key."""
    words = f"qwen3_toy seq=64 model.num_layers=1 iters=1 gbs={gbs}"
    tpi("verify", *words.split(), f"{axis}=1,2", "--dir", "cells", status=0)
    cells = [tpi.folder / "cells" / f"{axis}{degree}" for degree in (1, 2)]
    assert [read(cell).header.numerics[shards] for cell in cells] == [2, 2]
    single = scenario(words, f"{axis}=1")
    single.ledger()
    compared = tpi("compare", single.run, cells[0], status=2)
    assert f"numerics.{shards} is 1 and 2; train both with numerics.{shards}=2" in compared.stdout


# --- runs that go on in another layout ---

_MORE = "iters=4 ledger.state_digests=1 optimizer.use_distributed_optimizer=true"
# Words, the layout that saves, the one that goes on, or what is said instead.
RESUMED = (
    *(
        (f"{MOE} {FIXED} iters=4", *layouts, None)
        for layouts in (("dp=4 ep=4", "dp=2 ep=2"), ("dp=1 ep=1", "dp=2 ep=2"), ("dp=2 ep=2", "ep=1 dp=1"))
    ),
    (f"{MOE} {FIXED} iters=4", "dp=2 ep=2", "ep=1",
     "numerics.expert_groups=1: at tp=1 cp=1 dp=2 ep=1 a run adds an expert's gradient in 2 places"),
    (f"{DENSE} {MUON} {SHARED} iters=4", "tp=2", f"tp=1 dp=2 {LAYER_WISE}", None),
    (f"{DENSE} {MUON} {SHARED} iters=4", f"dp=2 {LAYER_WISE}",
     "dp=1 pp=1 optimizer.use_layer_wise_distributed_optimizer=false", None),
    (f"{MOE} {MUON} {SHARED} numerics.virtual_shards=4 iters=4", "tp=2 ep=2", "tp=1 ep=1", None),
    (f"{MOE} {MUON} {SHARED} numerics.virtual_shards=4 iters=4", f"tp=2 ep=2 {LAYER_WISE}", "tp=1 dp=2", None),
    (f"{MOE} {MUON} {SHARED} numerics.virtual_shards=4 iters=4", f"dp=2 ep=2 {LAYER_WISE}",
     "optimizer.use_layer_wise_distributed_optimizer=false",
     "it holds the state of experts with all other state; optimizer.use_layer_wise_distributed_optimizer=true"),
    (f"{rows.SMALL} {rows.TENSORWISE} {_MORE}", "tp=2", "tp=1 pp=2", None),
    (f"{rows.PORTABLE_SMALL} gbs=4 numerics.data_shards=2 {_MORE}", "dp=2", "dp=1 tp=2", None),
    (f"qwen3_toy seq=32 model.num_layers=1 {AHEAD} {RECOMPUTED} iters=4 ledger.state_digests=1", "tp=2", "tp=1", None),
)  # fmt: skip


@pytest.mark.release
@pytest.mark.usefixtures("portable_loops")
@pytest.mark.parametrize("words, first, then, says", RESUMED)
def test_a_run_goes_on_in_another_layout(scenario, tpi, words, first, then, says):
    tpi("train", *f"{words} save=2 {first} train.exit_interval=2 run.dir=run".split(), status=0)
    more = ("train", "--resume", "run", *then.split(), "train.exit_interval=null")
    if says is not None:
        assert says in tpi(*more, status=2).stderr
        return
    tpi(*more, status=0)
    assert unequal(list(read(tpi.folder / "run").steps), scenario(words, "save=2", first).ledger()) == []


# --- experts ---


@pytest.mark.release
def test_stacked_experts_have_one_digest_in_every_layout(scenario):
    parameters = {parameter.name: parameter for parameter in scenario(STACKED, "tp=1").header().parameters}
    assert parameters["decoder.layers.0.mlp.experts.*.linear_fc2.weight"].shape[0] == 8
    assert not [name for name in parameters if ".experts.0." in name]
    assert set(parameters) >= {"decoder.layers.0.mlp.router.weight", "embedding.word_embeddings.weight"}


@pytest.mark.release
@pytest.mark.parametrize("layout", ("dp=2 tp=2 ep=2 gbs=8 numerics.data_shards=4", "dp=4 ep=2 gbs=8"))
def test_a_guards_shadow_steps_follow_the_order(scenario, layout):
    guarded = scenario(MOE, "iters=2", layout)
    plain = guarded("guard=off")
    assert unequal(guarded("guard=shadow guard.every=1").ledger(), plain.ledger()) == []


@pytest.mark.release
def test_runs_of_other_groups_are_not_compared(scenario):
    moe = scenario(MOE, "iters=1 gbs=4 dp=2 ep=2")
    message = moe("numerics.expert_groups=1").compared(moe("numerics.expert_groups=2"), status=2)
    assert (
        "numerics.expert_groups is 1 and 2; train both with numerics.expert_groups=2" in message.stdout + message.stderr
    )
    moe("numerics.expert_groups=1").compared(moe(STOCK), status=1)


@pytest.mark.release
def test_the_norm_of_experts_and_all_else_is_one(scenario):
    """Left to Megatron it is put together of two rounded ones: those of experts, and of all else."""
    single = scenario(MOE, "iters=5 tp=1")
    whole, chained = single.ledger(), single.planted(without("ChainedOptimizer.get_grad_norm")).ledger()
    assert whole[0].gradients == chained[0].gradients
    assert [step.grad_norm for step in whole] != [step.grad_norm for step in chained]


@pytest.mark.release
def test_the_z_loss_counts_as_it_does_in_stock(scenario):
    """Its gradient is most of the router's where its coefficient is large."""
    model, large = scenario(MOE, "iters=1 precision=fp32"), "model.moe_z_loss_coeff=100"
    actual, stock, without = (bits_float(model(*more).ledger()[0].grad_norm) for more in ((large,), (large, STOCK), ()))
    assert actual == pytest.approx(stock, rel=1e-5)
    assert actual > 2 * without


# --- families ---

IN_FP32 = "gbs=1 iters=1 tp=1 precision=fp32"


@pytest.mark.release
@pytest.mark.usefixtures("families")
@pytest.mark.parametrize("model", ("gemma3", "gpt", "next", "olmoe"))
def test_the_model_is_bridges(scenario, model):
    """The invariant layers compute what Bridge's compute, to rounding: losses of step 1 and its gradient norms."""
    alone = scenario(MODELS[model], IN_FP32)
    (tree,), (stock,) = alone.ledger(), alone(STOCK).ledger()
    assert bits_float(tree.loss) == pytest.approx(bits_float(stock.loss), rel=1e-5)
    assert bits_float(tree.grad_norm) == pytest.approx(bits_float(stock.grad_norm), rel=1e-4)
    assert bits_float(tree.grad_norm) > 0.0
    assert tree.gradients.keys() == stock.gradients.keys()


@pytest.mark.release
@pytest.mark.usefixtures("families")
def test_without_the_patch_stock_does_not_train_biased_experts(tpi):
    words = (*MODELS["gpt_oss"].split(), "gbs=1", "iters=1", "numerics=stock")
    ended = tpi("train", *words, "patches.off=[core-expert-bias]", "run.dir=off", status=2)
    assert "is a view and is being modified inplace" in ended.stderr
    tpi("train", *words, "run.dir=on", status=0)


@pytest.mark.release
@pytest.mark.usefixtures("families")
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


@pytest.mark.release
@pytest.mark.usefixtures("families")
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


@pytest.mark.release
@pytest.mark.usefixtures("families")
def test_the_loss_of_a_batch_counts_the_sequences_before(scenario):
    """With one sequence it is that of a sequence; the second one's gradients know of the first one."""
    first, second = (scenario(NEXT, NEXT_ALONE, f"gbs={gbs} iters=1 model.moe_aux_loss_coeff=1.0") for gbs in (1, 2))
    of_each = "model.moe_router_load_balancing_type=seq_aux_loss"
    assert first.ledger()[0].gradients == first(of_each).ledger()[0].gradients
    assert second.ledger()[0].gradients != second(of_each).ledger()[0].gradients


@pytest.mark.release
@pytest.mark.usefixtures("families")
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


@pytest.mark.release
@pytest.mark.usefixtures("families")
def test_muon_of_whole_matrices_is_megatrons_own_at_tp_1(scenario):
    muon = scenario(DENSE, MUON, "iters=2 gbs=1 tp=1")
    assert unequal(muon.ledger(), muon.planted(without("_create_emerging_optimizer")).ledger()) == []
