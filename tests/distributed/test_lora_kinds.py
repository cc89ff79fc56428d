"""LoRA of Mamba layers, of multi-latent attention and of attention beside experts: one ledger for all layouts."""

import pytest

from tests.distributed.scenario import Scenario, agree, stock_differs, unequal
from tests.distributed.small_models import small

FIXED = "numerics.virtual_shards=4 peft=lora peft.dim=8"
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


@pytest.mark.timeout(1200)
def test_adapters_of_mamba_have_one_ledger(shared):
    mamba = _adapted(shared, "nemotron3_nano_toy", f"{MAMBA} iters=1")
    agree(mamba, ("tp=1", "tp=2 ep=2"))
    adapted = {name.partition(".adapter.")[0].rpartition(".")[2] for name in mamba("tp=1").ledger()[0].gradients}
    assert adapted == {"linear_qkv", "linear_proj", "in_proj", "out_proj"}


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


@pytest.mark.release
@pytest.mark.timeout(1200)
def test_stock_adapters_of_mamba_have_not(shared):
    assert "different at step 1" in stock_differs(
        _adapted(shared, "nemotron3_nano_toy", f"{MAMBA} iters=1"), ("tp=1", "tp=2")
    )


def _split_where_whole() -> None:
    from tp_invariant_recipes.numerics.megatron import adapters

    adapters.InvariantLinearAdapter.forward = adapters.ParallelLinearAdapter.forward


def _without_segments() -> None:
    from tp_invariant_recipes.numerics.megatron import adapters

    adapters._segments = lambda *_: 1


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "model, words, left_out",
    (("deepseek_v3_toy", LATENT, _split_where_whole), ("nemotron3_nano_toy", MAMBA, _without_segments)),
)
def test_each_ingredient_is_needed(shared, model, words, left_out):
    adapted = _adapted(shared, model, f"{words} iters=1 peft.lora_B_init_method=normal")
    one, two = (adapted(at).planted(left_out).ledger() for at in ("tp=1", "tp=2"))
    assert unequal(one, two)
