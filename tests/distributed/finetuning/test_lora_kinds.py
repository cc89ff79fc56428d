"""LoRA of Mamba layers, of multi-latent attention, of families' own layers and in FP8: one ledger for all layouts."""

import pytest

from tests.distributed.scenario import Scenario, agree, stock_differs, unequal
from tests.distributed.small_models import RECOMPUTED, small
from tests.ledgers import steps
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.features.export import workflow as export

FIXED = "numerics.virtual_shards=4 peft=lora peft.dim=8 model.moe_router_bias_update_rate=0"
MAMBA = f"{FIXED} peft.target_modules=[linear_qkv,linear_proj,in_proj,out_proj]"
_PARTS = "linear_q_down_proj,linear_q_up_proj,linear_kv_down_proj,linear_kv_up_proj,linear_proj"
LATENT = f"{FIXED} peft.target_modules=[{_PARTS}]"


def _adapted(tpi, model: str, words: str) -> Scenario:
    """Trainings of adapters on a model's first weights."""
    base = model.partition(" ")[0]
    if not (tpi.folder / base).exists():
        start = f"{small(model)} numerics.virtual_shards=4 iters=1 save=1 ledger.digests=0 lr=1e-6 optimizer.min_lr=0"
        tpi("train", *start.split(), f"run.dir={base}", status=0)
    start = f"checkpoint.pretrained_checkpoint={base}/checkpoints"
    return Scenario(tpi, tpi.folder / "runs")(small(model), words, start)


@pytest.mark.release
@pytest.mark.timeout(1200)
def test_adapters_of_mamba_and_of_experts_have_one_ledger(shared):
    """In one model, with one adapter for all experts of a layer."""
    words = MAMBA.replace("]", ",linear_fc1,linear_fc2] peft.lora_B_init_method=normal")
    both = _adapted(shared, "nemotron3_nano_toy", f"{words} iters=1")
    agree(both, ("tp=1", "tp=2 ep=2"))
    adapted = {name.partition(".adapter.")[0].partition("layers.")[2] for name in both("tp=1").ledger()[0].gradients}
    assert {"0.mixer.in_proj", "0.mixer.out_proj"} <= adapted
    assert {f"1.mlp.experts.experts.linear_fc{n}" for n in (1, 2)} <= adapted


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layouts", (("tp=1", "pp=2", "tp=4"), ("gbs=2 numerics.data_shards=2", "dp=2 ep=2 gbs=2")))
def test_adapters_of_mamba_have_it_in_other_layouts(shared, layouts):
    agree(_adapted(shared, "nemotron3_nano_toy", f"{MAMBA} iters=2"), layouts)


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", ("deepseek_v3_toy", "moonlight_toy"))
def test_adapters_of_latent_attention_have_one_ledger(shared, model):
    words = LATENT if model == "deepseek_v3_toy" else LATENT.replace("linear_q_down_proj,linear_q_up", "linear_q")
    latent = _adapted(shared, model, f"{words} iters=2")
    agree(latent, ("tp=1", "tp=2 ep=2", "pp=2", "tp=4"))


FP8 = "qwen3_toy seq=128 model.num_layers=1 model.kv_channels=32 numerics.virtual_shards=2 iters=2"
OF_FAMILY = "numerics.virtual_shards=2 iters=2"


def _first(tpi, model: str, words: str, more: str) -> Scenario:
    """Trainings of adapters on the first weights of a model."""
    base = f"{model.partition(' ')[0]}-first"
    if not (tpi.folder / base).exists():
        start = f"{model} {words} iters=1 save=1 ledger.digests=0 lr=1e-6 optimizer.min_lr=0"
        tpi("train", *start.split(), f"run.dir={base}", status=0)
    adapters = "peft=lora peft.dim=8 peft.lora_B_init_method=normal"
    return Scenario(tpi, tpi.folder / "runs")(
        model, words, adapters, more, f"checkpoint.pretrained_checkpoint={base}/checkpoints"
    )


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", ("gemma2_toy", "gemma3_toy", "exaone4_toy"))
def test_adapters_of_a_familys_own_layers_have_one_ledger(shared, model):
    adapted = _first(shared, f"{model} seq=32", OF_FAMILY, "gbs=2")
    agree(adapted, ("tp=1", "tp=2", "pp=2"))
    agree(adapted("numerics.data_shards=2"), ("dp=1", "dp=2"))
    stock_differs(adapted("iters=1"), ("tp=1", "tp=2"))


def _scales_by_rank() -> None:
    from tp_invariant_recipes.numerics.products import quantize

    real = quantize.of_tensor_both_ways
    quantize.of_tensor_both_ways = lambda x, dtype, group: real(x, dtype, None)


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("precision", ("fp8_tensorwise", "fp8_blockwise", "mxfp8"))
def test_adapters_of_layers_in_fp8_have_one_ledger(shared, precision):
    adapted = _first(shared, FP8, "", f"gbs=2 precision={precision}")
    agree(adapted, ("tp=1", "tp=2"))
    agree(adapted("numerics.data_shards=2"), ("dp=1", "dp=2"))
    assert unequal(adapted("tp=1").ledger(), adapted("precision=bf16", "tp=1").ledger())
    if precision == "fp8_tensorwise":
        assert unequal(adapted("tp=2").planted(_scales_by_rank).ledger(), adapted("tp=1").ledger())


@pytest.mark.release
@pytest.mark.timeout(1200)
def test_stock_adapters_of_mamba_have_not(shared):
    assert "different at step 1" in stock_differs(
        _adapted(shared, "nemotron3_nano_toy", f"{MAMBA} iters=1"), ("tp=1", "tp=2")
    )


def _split_where_whole() -> None:
    from tp_invariant_recipes.numerics.megatron.adapters import lora as adapters

    adapters.InvariantLinearAdapter.forward = adapters.ParallelLinearAdapter.forward


def _without_segments() -> None:
    from tp_invariant_recipes.numerics.megatron.adapters import lora as adapters

    adapters._segments = lambda *_: 1


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "model, words, omitted",
    (("deepseek_v3_toy", LATENT, _split_where_whole), ("nemotron3_nano_toy", MAMBA, _without_segments)),
)
def test_each_ingredient_is_needed(shared, model, words, omitted):
    adapted = _adapted(shared, model, f"{words} iters=1 peft.lora_B_init_method=normal")
    first, second = (adapted(at).planted(omitted).ledger() for at in ("tp=1", "tp=2"))
    assert unequal(first, second)


def test_adapters_after_a_norm_are_not_exported(bridge):
    adapted = ("peft=lora", "checkpoint.pretrained_checkpoint=base")
    with pytest.raises(ConfigError, match="adapters of linear_fc2 and linear_proj after the norms that EXAONE 4 has"):
        export._check_norms(compose("exaone4_toy", adapted, device="cpu").config)
    before = [*adapted, "peft.target_modules=[linear_qkv,linear_fc1]"]
    for model, words in (("exaone4_toy", before), ("qwen3_toy", adapted)):
        export._check_norms(compose(model, words, device="cpu").config)


_LAYERS = "linear_qkv,linear_proj,linear_fc1,linear_fc2"
AHEAD = f"{FIXED} peft.lora_B_init_method=normal"
# Model, its layers ahead, what is adapted.
DEPTHS = {
    "nemotron3_nano_toy": (
        "model.mtp_num_layers=2 model.mtp_use_repeated_layer=true model.mtp_hybrid_override_pattern=*ME",
        f"{_LAYERS},in_proj,out_proj",
    ),
    "deepseek_v3_toy": ("model.mtp_num_layers=1", f"{_PARTS},linear_fc1,linear_fc2"),
    "qwen3_moe_toy": ("model.mtp_num_layers=1", _LAYERS),
}


def _ahead(tpi, model: str) -> Scenario:
    """Trainings of adapters on a model with multi-token prediction."""
    depths, targets = DEPTHS[model]
    words = f"{small(model)} numerics.virtual_shards=4 {depths}"
    return _first(tpi, words, "", f"{AHEAD} peft.target_modules=[{targets}]")


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", DEPTHS)
def test_adapters_of_layers_ahead_have_one_ledger(shared, model):
    adapted = _ahead(shared, model)("iters=2")
    repeated = [f"{layout} {RECOMPUTED}" for layout in ("tp=1", "tp=2 ep=2", "pp=2") if model == "qwen3_moe_toy"]
    agree(adapted, ("tp=1", "tp=2 ep=2", "pp=2", *repeated))
    agree(adapted("gbs=2 numerics.data_shards=2"), ("dp=1", "dp=2 ep=2"))
    ahead = {name for name in adapted("tp=1").ledger()[1].gradients if name.startswith("mtp.")}
    assert {name.rpartition(".adapter.")[0].rpartition(".")[2] for name in ahead} >= {"linear_proj", "linear_fc1"}


@pytest.mark.release
@pytest.mark.timeout(1200)
def test_adapters_of_layers_ahead_count_and_stock_has_other_bits(shared):
    adapted = _ahead(shared, "nemotron3_nano_toy")("iters=1 peft.target_modules=[linear_qkv,linear_proj,in_proj]")
    stock_differs(adapted, ("tp=1", "tp=2"))  # stock weights of experts' adapters follow no seed of tpi
    single, scaled = adapted("tp=1").ledger(), adapted("tp=1 model.mtp_loss_scaling_factor=0.3").ledger()
    assert {name for name in single[0].gradients if single[0].gradients[name] != scaled[0].gradients[name]} >= {
        name for name in single[0].gradients if name.startswith("mtp.")
    }


@pytest.mark.parametrize("numerics", ("tree", "stock"))
def test_experts_bias_stays(cli, numerics):
    """A checkpoint of adapters lacks it."""
    words = ("numerics.virtual_shards=4", "peft=lora", f"numerics={numerics}", "device=cpu", "--dry-run")
    ended = cli("train", *small("deepseek_v3_toy").split(), *words)
    assert ended.status == 2
    assert "model.moe_router_bias_update_rate: checkpoints of adapters lack the experts' bias" in ended.err


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model, words", (("deepseek_v3_toy", LATENT), ("nemotron3_nano_toy", MAMBA)))
def test_adapters_of_a_model_with_experts_bias_go_on_in_another_layout(shared, tpi, model, words):
    start = _adapted(shared, model, f"{words} iters=2")("tp=2", "save=1").words
    shared("train", *start, f"run.dir={tpi.folder}/run", status=0)
    whole = steps(tpi.folder / "run")
    shared("train", "--resume", f"{tpi.folder}/run", "dp=1", "tp=1", "checkpoint.ckpt_step=1", status=0)
    assert steps(tpi.folder / "run") == whole
