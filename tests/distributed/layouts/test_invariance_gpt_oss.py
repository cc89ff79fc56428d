"""GPT-OSS under `numerics=tree`: experts with biases, clamped activations, sinks and windows have one ledger."""

import pytest

from tests.distributed.scenario import agree, stock_differs, unequal

MODEL = (
    "gpt_oss_toy seq=64 model.window_size=[7,0] model.hidden_size=64 model.moe_ffn_hidden_size=64 "
    "model.kv_channels=16 model.vocab_size=512"
)
SHARDS = "gbs=4 numerics.data_shards=4"

# What is held fixed, the layouts that must agree.
ROWS = (
    pytest.param("gbs=1 iters=2", ("tp=1", "tp=4 ep=2", "tp=2 pp=2"), marks=pytest.mark.release),
    pytest.param(
        f"{SHARDS} iters=2",
        ("dp=1", "dp=2 ep=2", "pp=2 dp=2 ep=2 optimizer.use_distributed_optimizer=true mbs=2"),
        marks=pytest.mark.release,
    ),
    pytest.param(
        f"{SHARDS} iters=2 model.calculate_per_token_loss=true", ("dp=1", "dp=2 ep=2"), marks=pytest.mark.release
    ),
    pytest.param("gbs=1 iters=2 precision=fp32", ("tp=1", "tp=2"), marks=pytest.mark.release),
)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fixed, layouts", ROWS)
def test_one_ledger_for_all_layouts(scenario, fixed, layouts):
    agree(scenario(MODEL, fixed), layouts)


@pytest.mark.release
def test_stock_does_not(scenario):
    message = stock_differs(scenario(MODEL, "gbs=1 iters=1"), ("tp=1", "tp=2"))
    assert "different at step 1" in message


@pytest.mark.release
def test_without_the_patch_stock_does_not_train(tpi):
    words = (*MODEL.split(), "gbs=1", "iters=1", "numerics=stock")
    ended = tpi("train", *words, "patches.off=[core-expert-bias]", "run.dir=off", status=2)
    assert "is a view and is being modified inplace" in ended.stderr
    tpi("train", *words, "run.dir=on", status=0)


# Every part of the model -> the override without it.
PARTS = {
    "sinks": "model.softmax_type=vanilla",
    "limit": "model.activation_func_clamp_value=0.01",
    "offset": "model.glu_linear_offset=0.0",
    "windows": "model.window_size=null",
}


@pytest.mark.release
@pytest.mark.parametrize("part", PARTS)
def test_every_part_counts(scenario, part):
    model = scenario(MODEL, "gbs=1 iters=1")
    assert model.ledger()[0].loss != model(PARTS[part]).ledger()[0].loss


def _biases_of_all_ranks() -> None:
    from tp_invariant_recipes.numerics.layers.experts import experts
    from tp_invariant_recipes.numerics.megatron import base

    def mark(module):
        for weight in module.parameters():
            weight.allreduce = False

    base.mark_separate = experts.mark_separate = mark


def _unmarked_sinks() -> None:
    from tp_invariant_recipes.numerics.megatron.attention import core_attention

    original = core_attention.CoreAttention.__init__

    def begin(self, *args, **kwargs):
        original(self, *args, **kwargs)
        for weight in self._sinks():
            weight.tensor_model_parallel = False

    core_attention.CoreAttention.__init__ = begin


# What is left out -> what then depends on tp first.
INGREDIENTS = {
    "a bias' gradient is the owner's": (_biases_of_all_ranks, "gradients"),
    "sinks are split over ranks": (_unmarked_sinks, "grad_norm"),
}


@pytest.mark.release
@pytest.mark.parametrize("omitted", INGREDIENTS)
def test_each_ingredient_is_needed(scenario, omitted):
    fault, differs = INGREDIENTS[omitted]
    first, second = (scenario(MODEL, "gbs=1 iters=1", at).planted(fault).ledger() for at in ("tp=1", "tp=2"))
    assert first[0].loss == second[0].loss
    assert getattr(first[0], differs) != getattr(second[0], differs)
    assert unequal(first, second)


@pytest.mark.parametrize(
    "words, message",
    (
        ("cp=2 numerics.context_shards=2 model.position_embedding_type=rope", "attention sinks have no version"),
        ("numerics=portable", "attention sinks have no portable version"),
        ("model.softmax_type=off-by-one", "of attention sinks only those of each head are covered"),
    ),
)
def test_what_is_refused(cli, words, message):
    ended = cli("train", *MODEL.split(), "device=cpu", "--dry-run", *words.split())
    assert ended.status == 2
    assert message in ended.err
