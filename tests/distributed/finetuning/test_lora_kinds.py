# SPDX-License-Identifier: Apache-2.0
"""LoRA of every kind of layer and in FP8: one ledger for all layouts."""

import re
import zlib

import pytest

from tests.distributed.scenario import Scenario, agree, stock_differs, unequal
from tests.distributed.small_models import RECOMPUTED, small
from tests.ledgers import steps
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.features.export import workflow as export

RANDOM = "peft.lora_B_init_method=normal"


def _targets(*names: str) -> str:
    return f"peft.target_modules=[{','.join(names)}]"


ALL = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
PARTS = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
MAMBA = ("linear_qkv", "linear_proj", "in_proj", "out_proj")

# Models: a name, and words.
SHARDS = "numerics.virtual_shards=4"
HYBRID, EXPERTS = f"{small('nemotron3_nano_toy')} {SHARDS}", f"{small('qwen3_moe_toy')} {SHARDS}"
LATENT, MOONLIGHT = f"{small('deepseek_v3_toy')} {SHARDS}", f"{small('moonlight_toy')} {SHARDS}"
FAMILIES = tuple(f"{name}_toy seq=32 gbs=2 numerics.virtual_shards=2" for name in ("gemma3",))
FP8 = "qwen3_toy seq=128 gbs=2 model.num_layers=1 model.kv_channels=32 numerics.virtual_shards=2"
FP8_EXPERTS = (
    "qwen3_moe_toy seq=128 gbs=1 numerics.virtual_shards=2 model.num_layers=1 model.hidden_size=128 "
    "model.num_attention_heads=4 model.num_query_groups=4 model.kv_channels=32 model.ffn_hidden_size=128 "
    "model.moe_ffn_hidden_size=128 model.num_moe_experts=8 model.vocab_size=512"
)
# With multi-token prediction: layers ahead.
AHEAD = {
    f"{HYBRID} model.mtp_num_layers=2 model.mtp_use_repeated_layer=true model.mtp_hybrid_override_pattern=*ME": (
        *MAMBA,
        "linear_fc1",
        "linear_fc2",
    ),
    f"{LATENT} model.mtp_num_layers=1": (*PARTS, "linear_fc1", "linear_fc2"),
    f"{EXPERTS} model.mtp_num_layers=1": ALL,
}
# One adapter for all experts of a layer, or one for each.
KINDS = ("peft.share_expert_adapters=true", "peft.share_expert_adapters=false")
DATA = "gbs=2 numerics.data_shards=2"
# Two shards of a group take turns on a rank, or come from two ranks.
GROUPS = "gbs=4 numerics.data_shards=4 numerics.expert_groups=2"


def _adapted(tpi, model: str, words: str) -> Scenario:
    """Trainings of adapters on a model's first weights."""
    base = f"{model.partition(' ')[0]}-{zlib.crc32(model.encode())}"
    if not (tpi.folder / base).exists():
        start = f"{model} iters=1 save=1 ledger.digests=0 lr=1e-6 optimizer.min_lr=0"
        tpi("train", *start.split(), f"run.dir={base}", status=0)
    peft = f"peft=lora peft.dim=8 iters=2 checkpoint.pretrained_checkpoint={base}/checkpoints"
    bias = "model.moe_router_bias_update_rate=0" if "moe" in model else ""
    return Scenario(tpi, tpi.folder / "runs")(model, bias, peft, words)


# A model, what is adapted and how, the layouts of each batch, and modules that must have adapters.
ROWS = (
    (HYBRID, _targets(*MAMBA), ("tp=1", "pp=2", "tp=4"), (DATA, f"{DATA} dp=2 ep=2")),
    (HYBRID, f"{_targets(*MAMBA, 'linear_fc1', 'linear_fc2')} {RANDOM}", ("tp=1", "tp=2 ep=2")),
    (LATENT, _targets(*PARTS), ("tp=1", "tp=2 ep=2", "pp=2", "tp=4")),
    (LATENT, RANDOM, ("tp=1", "tp=2 ep=2")),
    (MOONLIGHT, _targets("linear_q_proj", *PARTS[2:]), ("tp=1", "tp=2 ep=2", "pp=2", "tp=4")),
    *(
        (EXPERTS, f"{kind} {RANDOM}", ("tp=1", "tp=2", "tp=4 ep=2", "pp=2"),
         (DATA, f"{DATA} dp=2", f"{DATA} dp=2 ep=2", f"{DATA} dp=2 tp=2 ep=4"),
         (GROUPS, f"{GROUPS} dp=2", f"{GROUPS} dp=2 ep=2", f"{GROUPS} dp=4 ep=2"))
        for kind in KINDS
    ),
    *((model, RANDOM, ("tp=1", "tp=2", "pp=2"), (DATA, f"{DATA} dp=2")) for model in FAMILIES),
    *(
        (FP8, f"{RANDOM} precision={precision}", ("tp=1", "tp=2"), (DATA, f"{DATA} dp=2"))
        for precision in ("fp8_tensorwise", "fp8_blockwise", "mxfp8")
    ),
    *((FP8_EXPERTS, f"{kind} {RANDOM} precision=fp8_tensorwise", ("tp=1", "tp=2 ep=2")) for kind in KINDS),
    *(
        (model, f"{RANDOM} {_targets(*names)}", ("tp=1", "tp=2 ep=2", "pp=2"), (DATA, f"{DATA} dp=2 ep=2"))
        for model, names in AHEAD.items()
    ),
    (tuple(AHEAD)[-1], f"{RANDOM} {RECOMPUTED}", ("tp=1", "tp=2 ep=2", "pp=2")),
)  # fmt: skip
# Patterns of adapters that must be trained.
TRAINED = {
    ROWS[1][:2]: (r"0\.mixer\.in_proj", r"0\.mixer\.out_proj", r"1\.mlp\.experts\.experts\.linear_fc[12]"),
    ROWS[3][:2]: (r"\.mlp\.shared_experts\.linear_fc1",),
    **{row[:2]: (r"^mtp\..*\.linear_proj", r"^mtp\..*\.linear_fc1") for row in ROWS if row[0] in AHEAD},
}


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[:2])[:80])
def test_adapters_have_one_ledger_in_all_layouts(shared, row):
    model, words, *batches = row
    adapted = _adapted(shared, model, words)
    for layouts in batches:
        agree(adapted, layouts)
    names = adapted("tp=1").ledger()[0].gradients
    for pattern in TRAINED.get(row[:2], ()):
        assert any(re.search(rf"{pattern}\.adapter\.", name) for name in names), pattern


STOCK_DIFFERS = (
    (HYBRID, _targets(*MAMBA)),
    *((model, RANDOM) for model in FAMILIES),
    (next(iter(AHEAD)), f"{RANDOM} {_targets(*MAMBA[:3])}"),  # stock weights of experts' adapters follow no seed of tpi
)


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model, words", STOCK_DIFFERS)
def test_stock_adapters_have_not(shared, model, words):
    assert "different at step 1" in stock_differs(_adapted(shared, model, f"{words} iters=1"), ("tp=1", "tp=2"))


def _scales_by_rank() -> None:
    from tp_invariant_recipes.numerics.gemm import quantize

    real = quantize.of_tensor_both_ways
    quantize.of_tensor_both_ways = lambda x, dtype, group: real(x, dtype, None)


def _split_where_whole() -> None:
    from tp_invariant_recipes.numerics.megatron import lora as adapters

    adapters.InvariantLinearAdapter.forward = adapters.ParallelLinearAdapter.forward


def _without_segments() -> None:
    from tp_invariant_recipes.numerics.megatron import lora as adapters

    adapters._segments = lambda *_: 1


def _plain_sum_over_ranks() -> None:
    """What a rank has of all experts, one after the other, then the ranks' sums: as Bridge's all-reduce adds."""
    from tp_invariant_recipes.numerics.layers.experts import expert_adapters

    expert_adapters.tree_sum = lambda partials, *_: sum(partials[1:], start=partials[0])


INGREDIENTS = (
    (LATENT, f"{_targets(*PARTS)} {RANDOM}", "tp=2", _split_where_whole),
    (HYBRID, f"{_targets(*MAMBA)} {RANDOM}", "tp=2", _without_segments),
    (EXPERTS, RANDOM, "tp=2 ep=2", _plain_sum_over_ranks),
    (FP8, f"{RANDOM} precision=fp8_tensorwise", "tp=2", _scales_by_rank),
)


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model, words, layout, omitted", INGREDIENTS)
def test_each_ingredient_is_needed(shared, model, words, layout, omitted):
    adapted = _adapted(shared, model, f"{words} iters=1")
    first, second = (adapted(at).planted(omitted).ledger() for at in ("tp=1", layout))
    assert unequal(first, second)


COUNTS = (
    (EXPERTS, RANDOM, *KINDS),
    (FP8_EXPERTS, f"{RANDOM} precision=fp8_tensorwise", *KINDS),
    *((FP8, RANDOM, "", f"precision={precision}") for precision in ("fp8_tensorwise", "fp8_blockwise", "mxfp8")),
    (next(iter(AHEAD)), f"{RANDOM} {_targets(*MAMBA[:3])}", "", "model.mtp_loss_scaling_factor=0.3"),
)


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model, words, first, other", COUNTS)
def test_what_is_set_counts(shared, model, words, first, other):
    """Bits change, so that nothing of it is left out of what has the same bits in every layout."""
    adapted = _adapted(shared, model, f"{words} iters=1")
    (first_step,), (other_step,) = (adapted(words, "tp=1").ledger() for words in (first, other))
    assert first_step.gradients.keys() == other_step.gradients.keys()
    changed = {name for name, digest in first_step.gradients.items() if other_step.gradients[name] != digest}
    assert changed
    assert changed >= {name for name in first_step.gradients if name.startswith("mtp.")}


ELSEWHERE = (
    *((EXPERTS, f"{kind} {RANDOM} {DATA}", "dp=2 ep=2 optimizer.use_distributed_optimizer=true "
       "ddp.overlap_grad_reduce=false", "dp=1 ep=1 tp=2") for kind in KINDS),
    (LATENT, _targets(*PARTS), "tp=2", "tp=1"),
    (HYBRID, _targets(*MAMBA), "tp=2", "tp=1"),
)  # fmt: skip


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model, words, layout, then", ELSEWHERE)
def test_a_run_goes_on_in_another_layout(shared, tpi, model, words, layout, then):
    run = f"run.dir={tpi.folder}/run"
    shared("train", *_adapted(shared, model, words)(layout, "save=1").words, run, status=0)
    whole = steps(tpi.folder / "run")
    shared("train", "--resume", tpi.folder / "run", *then.split(), "checkpoint.ckpt_step=1", status=0)
    assert steps(tpi.folder / "run") == whole


def test_adapters_after_a_norm_are_not_exported(bridge):
    adapted = ("peft=lora", "checkpoint.pretrained_checkpoint=base")
    with pytest.raises(ConfigError, match="adapters of linear_fc2 and linear_proj after the norms that Gemma 3 has"):
        export._check_norms(compose("gemma3_toy", adapted, device="cpu").config)
    before = [*adapted, "peft.target_modules=[linear_qkv,linear_fc1]"]
    for model, words in (("gemma3_toy", before), ("qwen3_toy", adapted)):
        export._check_norms(compose(model, words, device="cpu").config)


@pytest.mark.parametrize("numerics", ("tree", pytest.param("stock", marks=pytest.mark.release)))
def test_experts_bias_stays(cli, numerics):
    """A checkpoint of adapters lacks it."""
    words = ("numerics.virtual_shards=4", "peft=lora", f"numerics={numerics}", "device=cpu", "--dry-run")
    ended = cli("train", *small("deepseek_v3_toy").split(), *words)
    assert ended.status == 2
    assert "model.moe_router_bias_update_rate: checkpoints of adapters lack the experts' bias" in ended.err
