"""Qwen3-Next under `numerics=tree`: gated delta nets, gates, and the balancing loss of a batch have one ledger."""

import pytest

from tests.distributed.runs.test_checkpoints_interchange import tensors_of
from tests.distributed.scenario import STOCK, agree, stock_differs, unequal
from tests.distributed.small_models import RECOMPUTED
from tests.operands import same_bits
from tp_invariant_recipes.ledger.bits import bits_float

MODEL = (
    "qwen3_next_toy seq=32 model.hidden_size=64 model.moe_ffn_hidden_size=64 model.kv_channels=16 model.vocab_size=512 "
    "model.linear_key_head_dim=16 model.linear_value_head_dim=16"
)
ALONE = "model.mtp_num_layers=null"
DENSE = (  # as Qwen3.5 9B is
    f"{ALONE} model.num_moe_experts=null model.moe_ffn_hidden_size=null model.moe_shared_expert_intermediate_size=null"
)
SHARDS = "gbs=4 numerics.data_shards=2"  # two sequences in each
SELECTIVE = "model.recompute_granularity=selective model.recompute_modules=[layernorm,moe]"

pytestmark = [pytest.mark.release, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    "fixed, layouts",
    (
        ("gbs=1 iters=2", ("tp=1", "tp=2", "tp=4 ep=2", "pp=2")),
        (
            f"{SHARDS} iters=2",
            (
                "dp=1",
                "dp=2 ep=2 mbs=2",
                "pp=2 mbs=2",
                f"dp=1 {SELECTIVE}",
                f"pp=2 {SELECTIVE}",
                f"dp=1 {RECOMPUTED}",
                f"dp=2 ep=2 pp=2 {RECOMPUTED}",
            ),
        ),
        (f"gbs=1 iters=1 precision=fp32 {ALONE}", ("tp=1", "tp=2")),
        (f"gbs=1 iters=2 {DENSE}", ("tp=1", "tp=2", "pp=2")),
    ),
)
def test_one_ledger_for_all_layouts(scenario, fixed, layouts):
    agree(scenario(MODEL, fixed), layouts)


@pytest.mark.parametrize("fixed", ("", DENSE), ids=("experts", "dense"))
def test_stock_does_not(scenario, fixed):
    message = stock_differs(scenario(MODEL, f"gbs=1 iters=1 {fixed}"), ("tp=1", "tp=2"))
    assert "different at step 1" in message


def test_stock_computes_the_same_model(scenario):
    """To the rounding of fp32, multi-token prediction and balancing included."""
    model = scenario(MODEL, "gbs=1 iters=1 precision=fp32")
    tree, stock = (model(words).ledger()[0] for words in ("tp=1", f"{STOCK} tp=1"))
    for name in ("loss", "grad_norm"):
        actual, expected = (bits_float(getattr(step, name)) for step in (tree, stock))
        assert actual == pytest.approx(expected, rel=1e-5), name
        assert actual > 0.0


# Every part of the model -> the override without it.
PARTS = {
    "gated delta nets": "model.experimental_attention_variant=null model.linear_attention_freq=null",
    "attention's gate": "model.attention_output_gate=false",
    "the shared expert's gate": "model.moe_shared_expert_gate=false",
}


@pytest.mark.parametrize("part", PARTS)
def test_every_part_counts(scenario, part):
    model = scenario(MODEL, "gbs=1 iters=1")
    assert model.ledger()[0].loss != model(PARTS[part]).ledger()[0].loss


def test_the_loss_of_a_batch_counts_the_sequences_before(scenario):
    """With one sequence it is that of a sequence; the second one's gradients know of the first one."""
    first, second = (scenario(MODEL, ALONE, f"gbs={gbs} iters=1 model.moe_aux_loss_coeff=1.0") for gbs in (1, 2))
    of_each = "model.moe_router_load_balancing_type=seq_aux_loss"
    assert first.ledger()[0].gradients == first(of_each).ledger()[0].gradients
    assert second.ledger()[0].gradients != second(of_each).ledger()[0].gradients


def _stocks_gate() -> None:
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

    from tp_invariant_recipes.numerics.megatron.moe import moe_layer

    moe_layer.InvariantSharedExpertMLP.forward = SharedExpertMLP.forward


def _counts_of_all_shards() -> None:
    from tp_invariant_recipes.numerics.megatron.moe.router import InvariantTopKRouter

    reset = InvariantTopKRouter.reset_global_aux_loss_tracker

    def of_batch(self, counts):
        self.global_tokens_per_expert += counts
        self.counted += 1
        return self.global_tokens_per_expert / self.counted

    InvariantTopKRouter._of_batch = of_batch
    InvariantTopKRouter.reset_global_aux_loss_tracker = reset


# What is left out -> the layouts that then differ.
INGREDIENTS = {
    "the gate's gradient is a tree": (_stocks_gate, "gbs=1", ("tp=1", "tp=2")),
    "counts are of a data shard": (_counts_of_all_shards, SHARDS, ("dp=1", "dp=2 ep=2")),
}


@pytest.mark.parametrize("omitted", INGREDIENTS)
def test_each_ingredient_is_needed(scenario, omitted):
    fault, fixed, layouts = INGREDIENTS[omitted]
    model = scenario(MODEL, ALONE, fixed, "iters=1 model.moe_aux_loss_coeff=1.0")
    assert unequal(*(model(at).planted(fault).ledger() for at in layouts))


def test_checkpoints_go_to_stock_and_back(tpi):
    """Under the same names; stock at tp=2 continues with the weights that tree has saved at tp=1."""
    words = ("train", *f"{MODEL} gbs=1 iters=1 save=1".split())
    tpi(*words, "run.dir=tree", status=0)
    still = ("optimizer.lr=0", "optimizer.min_lr=0", "tp=2", "checkpoint.pretrained_checkpoint=tree/checkpoints")
    tpi(*words, "numerics=stock", *still, "run.dir=stock", status=0)
    (tree, names), (stock, others) = (
        tensors_of(tpi.folder / run / "checkpoints" / "iter_0000001") for run in ("tree", "stock")
    )
    assert {name for name in names if "rng" not in name} == {name for name in others if "rng" not in name}
    weights = [name for name in tree if not name.startswith(("optimizer", "rng"))]
    assert {f"decoder.layers.0.self_attention.in_proj.weight.{part}" for part in ("query", "z", "alpha")} < {*weights}
    assert [name for name in weights if not same_bits(tree[name], stock[name])] == []
