"""Families with layers of their own under `numerics=tree`: OLMoE, EXAONE 4, Gemma 2, Gemma 3."""

import pytest

from tests.distributed.scenario import STOCK, agree, stock_differs, unequal
from tp_invariant_recipes.ledger.bits import bits_float

pytestmark = pytest.mark.usefixtures("families")

DENSE = (
    "seq=64 model.num_layers=2 model.hidden_size=64 model.ffn_hidden_size=256 model.kv_channels=16 model.vocab_size=512"
)
MODELS = {
    "exaone4": f"exaone4_toy {DENSE}",
    "gemma2": f"gemma2_toy {DENSE} model.window_size=[7,0]",
    "gemma3": f"gemma3_toy {DENSE} model.window_size=8",
    "olmoe": f"olmoe_toy {DENSE} model.moe_ffn_hidden_size=64",
}
SHORT = "gbs=1 iters=2"
SHARDS = "gbs=4 numerics.data_shards=4 iters=2"

# Family, what is held fixed, the layouts that must agree.
ROWS = (
    pytest.param("exaone4", f"{SHORT} model.num_layers=1", ("tp=1", "tp=2"), marks=pytest.mark.release),
    pytest.param("exaone4", SHORT, ("tp=1", "tp=2 sp=false", "tp=2 pp=2"), marks=pytest.mark.release),
    pytest.param("exaone4", SHARDS, ("dp=1", "dp=2 mbs=2", "pp=2 dp=2"), marks=pytest.mark.release),
    pytest.param("exaone4", f"{SHORT} precision=fp32", ("tp=1", "tp=4"), marks=pytest.mark.release),
    pytest.param("gemma2", SHORT, ("tp=1", "tp=2 pp=2", "tp=4 sp=false"), marks=pytest.mark.release),
    pytest.param("gemma2", SHARDS, ("dp=1", "dp=2 mbs=2", "pp=2 dp=2"), marks=pytest.mark.release),
    pytest.param("gemma3", SHORT, ("tp=1", "tp=2 pp=2", "tp=4 sp=false"), marks=pytest.mark.release),
    pytest.param("gemma3", SHARDS, ("dp=1", "dp=2 mbs=2", "pp=2 dp=2"), marks=pytest.mark.release),
    pytest.param("olmoe", SHORT, ("tp=1", "tp=4 ep=2", "tp=2 pp=2"), marks=pytest.mark.release),
    pytest.param("olmoe", SHARDS, ("dp=1", "dp=2 ep=2 mbs=2", "tp=2 dp=2 ep=2"), marks=pytest.mark.release),
)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family, fixed, layouts", ROWS)
def test_one_ledger_for_all_layouts(scenario, family, fixed, layouts):
    agree(scenario(MODELS[family], fixed), layouts)


# Family -> two layouts that stock numerics has; Bridge's OLMoE has none with tp.
STOCK_LAYOUTS = dict.fromkeys(MODELS, ("tp=1", "tp=2")) | {"olmoe": ("gbs=2 dp=1", "gbs=2 dp=2 ep=2")}


@pytest.mark.release
@pytest.mark.parametrize("family", MODELS)
def test_stock_does_not(scenario, family):
    message = stock_differs(scenario(MODELS[family], "gbs=1 iters=1"), STOCK_LAYOUTS[family])
    assert "different at step 1" in message


@pytest.mark.release
@pytest.mark.parametrize("family", MODELS)
def test_the_model_is_bridges(scenario, family):
    """The invariant layers compute what Bridge's compute, to rounding: losses of step 1 and its gradient norms."""
    model = scenario(MODELS[family], "gbs=1 iters=1 tp=1 precision=fp32")
    (tree,), (stock,) = model.ledger(), model(STOCK).ledger()
    assert bits_float(tree.loss) == pytest.approx(bits_float(stock.loss), rel=1e-5)
    assert bits_float(tree.grad_norm) == pytest.approx(bits_float(stock.grad_norm), rel=1e-4)
    assert tree.gradients.keys() == stock.gradients.keys()


# Family, override -> what is another model with it.
PARTS = (
    ("gemma2", "model.attn_logit_softcapping=0.05"),
    ("gemma2", "model.final_logit_softcapping=0.5"),
    ("gemma2", "model.window_size=[63,0]"),
    ("gemma2", "model.query_pre_attn_scalar=64"),
    ("gemma3", "model.window_size=64"),
    ("gemma3", "model.rotary_base=[500,1000000]"),
    ("gemma3", "model.interleaved_attn_pattern=[5,1]"),
)


@pytest.mark.release
@pytest.mark.parametrize("family, other", PARTS)
def test_every_part_counts(scenario, family, other):
    model = scenario(MODELS[family], "gbs=1 iters=1 tp=1")
    assert model.ledger()[0].gradients != model(other).ledger()[0].gradients


def _unshifted_backward() -> None:
    from tp_invariant_recipes.numerics.layers import norm

    original = norm.Norm.backward

    def backward(self, *args):
        return original(self._replace(centred=False), *args)

    norm.Norm.backward = backward


@pytest.mark.release
def test_stock_sees_a_norm_whose_backward_pass_forgets_the_one(scenario):
    """What `test_the_model_is_bridges` tells apart."""
    wrong = scenario(MODELS["gemma2"], "gbs=1 iters=1 tp=1 precision=fp32").planted(_unshifted_backward).ledger()[0]
    unbroken = scenario(MODELS["gemma2"], "gbs=1 iters=1 tp=1 precision=fp32").ledger()[0]
    assert wrong.loss == unbroken.loss
    assert bits_float(wrong.grad_norm) != pytest.approx(bits_float(unbroken.grad_norm), rel=1e-4)


def _norm_of_own_heads() -> None:
    from tp_invariant_recipes.numerics.megatron import local
    from tp_invariant_recipes.numerics.megatron.families import layers

    def forward(self, x):
        own = self.weight.view(-1, x.shape[-1])[: x.shape[2]].flatten()
        return local.InvariantRMSNorm.forward(self, x.flatten(2).repeat(1, 1, len(self.weight) // len(own))).view(
            *x.shape[:2], -1, x.shape[-1]
        )[:, :, : x.shape[2]]

    layers.NormOfAllHeads.forward = forward


@pytest.mark.release
def test_olmoes_norm_is_of_all_heads(scenario):
    model = scenario(MODELS["olmoe"], "gbs=1 iters=1").planted(_norm_of_own_heads)
    assert unequal(model("tp=1").ledger(), model("tp=2").ledger())


@pytest.mark.parametrize(
    "words, message",
    (
        ("cp=2 numerics.context_shards=2", "a family with layers of its own has no version with context shards"),
        ("numerics=portable", "families with own layers are covered by numerics=tree only"),
        ("precision=fp8_tensorwise", "a family with layers of its own has no version in FP8"),
        ("model.attention_backend=unfused", "soft-capped attention is computed by Megatron's own products"),
    ),
)
def test_what_is_refused(cli, words, message):
    ended = cli("train", *MODELS["gemma2"].split(), "device=cpu", "--dry-run", *words.split())
    assert ended.status == 2
    assert message in ended.err
