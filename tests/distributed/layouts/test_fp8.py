"""Training in FP8 on a CPU: one ledger for every layout, another one for whatever is left out.

Stock FP8 needs Transformer Engine, so its control is tests/gpu/test_layouts_gpu.py. Here the control of a row is a run
from equal weights without one ingredient.
"""

import pytest

from tests.distributed.scenario import agree, unequal
from tests.distributed.small_models import RECOMPUTED
from tp_invariant_recipes.numerics.precision import DEFINITION, MXFP8

# Two shards whose parts of every sum are multiples of 128.
SMALL = "qwen3_toy seq=128 gbs=2 iters=2 model.kv_channels=32 numerics.virtual_shards=2"
SINGLE_LAYER = f"{SMALL} gbs=1 iters=1 model.num_layers=1"
CONTEXT = f"{SMALL} seq=256 numerics.context_shards=2"
EXPERTS = (
    "qwen3_moe_toy seq=128 gbs=1 iters=2 numerics.virtual_shards=2 model.num_layers=2 model.hidden_size=128 "
    "model.moe_ffn_hidden_size=128 model.num_attention_heads=8 model.num_query_groups=4 model.kv_channels=32 "
    "model.vocab_size=512 model.ffn_hidden_size=256"
)
LATENT = (
    "deepseek_v3_toy seq=128 gbs=1 iters=2 numerics.virtual_shards=2 model.num_layers=2 model.moe_layer_freq=[0,1] "
    "model.hidden_size=128 model.num_attention_heads=8 model.q_lora_rank=128 model.kv_lora_rank=128 "
    "model.qk_head_dim=32 model.qk_pos_emb_head_dim=32 model.v_head_dim=32 model.vocab_size=512 "
    "model.ffn_hidden_size=256 model.moe_ffn_hidden_size=128 model.moe_shared_expert_intermediate_size=256 "
    "model.num_moe_experts=8"
)
# Sides in steps of 16, and of dt 2 numbers a shard; the first and the last layer are in bf16.
HYBRID = (
    "nemotron3_nano_toy seq=128 gbs=1 iters=2 numerics.virtual_shards=2 model.hybrid_layer_pattern=ME*EM- "
    "model.hidden_size=80 model.num_attention_heads=4 model.num_query_groups=2 model.kv_channels=16 "
    "model.vocab_size=512 model.ffn_hidden_size=192 model.moe_ffn_hidden_size=96 model.num_moe_experts=8 "
    "model.moe_shared_expert_intermediate_size=192 model.mamba_num_heads=4 model.mamba_num_groups=2 "
    "model.mamba_head_dim=16 model.mamba_state_dim=16"
)
# Of alpha and beta 4 numbers a shard.
DELTA = (
    "qwen3_next_toy seq=128 gbs=1 iters=1 numerics.virtual_shards=2 model.hidden_size=128 model.num_attention_heads=4 "
    "model.num_query_groups=4 model.kv_channels=32 model.vocab_size=512 model.moe_ffn_hidden_size=128 "
    "model.moe_shared_expert_intermediate_size=128 model.linear_num_key_heads=4 model.linear_num_value_heads=8"
)
TENSORWISE, BLOCKWISE, BY_32 = "precision=fp8_tensorwise", "precision=fp8_blockwise", "precision=mxfp8"
NAMED = "mixed_precision=bf16_with_fp8_current_scaling_mixed"

ROWS = {
    f"{SINGLE_LAYER} {TENSORWISE}": ("tp=1", "tp=2"),
}
# Sizes of 32 and tokens of 32; Mamba's dt too.
BY_32_ROWS = {
    f"{SINGLE_LAYER} {BY_32} seq=96": ("tp=1", "tp=2"),
    f"{SMALL} {BY_32} seq=32": ("tp=1", "tp=2 sp=false", "tp=2 pp=2", "mbs=2", f"tp=2 {RECOMPUTED}"),
    f"{SMALL} {BY_32} mixed_precision.fp8=hybrid gbs=4 numerics.data_shards=2": ("dp=1", "dp=2", "dp=2 tp=2"),
    f"{CONTEXT} {BY_32} seq=64": ("cp=1", "cp=2", "tp=2"),
    f"{EXPERTS} {BY_32}": ("tp=1", "tp=2 ep=2", "pp=2"),
    f"{LATENT} {BY_32}": ("tp=1", "tp=2 ep=2", "pp=2"),
    f"{HYBRID} {BY_32} model.hidden_size=96 model.mamba_num_heads=64 model.mamba_num_groups=4 model.kv_channels=32": (
        "tp=1", "tp=2 ep=2", "pp=2",
    ),
    f"{SINGLE_LAYER} {BY_32} numerics=portable": ("tp=1", "tp=2"),
    f"{SMALL} {BY_32} model.num_layers=3 mixed_precision.first_last_layers_bf16=true "
    "mixed_precision.num_layers_at_start_in_bf16=1 mixed_precision.num_layers_at_end_in_bf16=1": ("tp=1", "pp=3"),
}  # fmt: skip
LONGER = {
    **BY_32_ROWS,
    f"{SMALL} {TENSORWISE}": ("tp=1", "tp=2 sp=false", "tp=2 pp=2", "mbs=2", f"tp=2 {RECOMPUTED}"),
    f"{SMALL} {TENSORWISE} gbs=4 numerics.data_shards=2": ("dp=1", "dp=2", "dp=2 tp=2", "mbs=2"),
    f"{SMALL} {BLOCKWISE}": ("tp=1", "tp=2", "tp=2 sp=false", "tp=2 pp=2"),
    f"{SMALL} {BLOCKWISE} gbs=4 numerics.data_shards=2": ("dp=1", "dp=2"),
    f"{CONTEXT} {TENSORWISE}": ("cp=1", "cp=2", "tp=2"),
    f"{CONTEXT} {BLOCKWISE}": ("cp=1", "cp=2"),
    f"{EXPERTS} {TENSORWISE}": ("tp=1", "tp=2 ep=2"),
    f"{EXPERTS} {BLOCKWISE}": ("tp=1", "tp=2 ep=2"),
    f"{LATENT} {TENSORWISE}": ("tp=1", "tp=2 ep=2", "pp=2"),
    f"{LATENT} {BLOCKWISE}": ("tp=1", "tp=2 ep=2"),
    f"{SMALL} {TENSORWISE} model.mtp_num_layers=2 gbs=4 numerics.data_shards=2": (
        "dp=1",
        f"dp=2 {RECOMPUTED}",
        f"tp=2 {RECOMPUTED}",
    ),
    f"{SMALL} {BY_32} seq=32 model.mtp_num_layers=1": ("tp=1", f"tp=1 {RECOMPUTED}", f"tp=2 {RECOMPUTED}"),
    f"{SMALL} {BLOCKWISE} model.mtp_num_layers=1": ("tp=1", f"tp=2 {RECOMPUTED}"),
    f"{LATENT} {TENSORWISE} model.mtp_num_layers=1 gbs=2 numerics.data_shards=2": ("dp=1", "dp=2 ep=2", "pp=2"),
    f"{HYBRID} {NAMED}": ("tp=1", "tp=2 ep=2", "pp=2"),
    f"{HYBRID} {NAMED} model.mtp_num_layers=1 model.mtp_hybrid_override_pattern=*M gbs=2 numerics.data_shards=2": (
        "dp=1",
        "dp=2",
        "pp=2",
    ),
    f"{DELTA} {TENSORWISE}": ("tp=1", "tp=2 ep=2", "pp=2"),
    f"{SINGLE_LAYER} {TENSORWISE} numerics=portable": ("tp=1", "tp=2"),
    f"{SINGLE_LAYER} {BLOCKWISE} numerics=portable": ("tp=1", "tp=2"),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "fixed, layouts", (*ROWS.items(), *(pytest.param(*row, marks=pytest.mark.release) for row in LONGER.items()))
)
def test_one_ledger_for_all_layouts(scenario, fixed, layouts):
    agree(scenario(fixed), layouts)
    named = MXFP8 if "mxfp8" in fixed else DEFINITION
    assert scenario(fixed, layouts[0]).header().device["fp8"] == named


@pytest.mark.release
def test_another_format_or_precision_differs(scenario):
    """Tokens that a rank rounds by itself: tests/distributed/numerics/linear/test_mxfp8_linear.py."""
    fixed = scenario(f"{SINGLE_LAYER} {BY_32}", "tp=1")
    others = [fixed(text).ledger()[0].gradients for text in ("mixed_precision.fp8=hybrid", "precision=bf16")]
    assert fixed.ledger()[0].gradients not in others


@pytest.mark.release
def test_precisions_have_other_bits(scenario):
    """Also: the first and last layers of a recipe that keeps them in bf16 are in bf16, which is all of two."""
    ledgers = [scenario(SINGLE_LAYER, p, "tp=1").ledger() for p in (TENSORWISE, BLOCKWISE, "precision=bf16")]
    assert len({str(ledger[0].gradients) for ledger in ledgers}) == 3
    named = scenario(f"{SMALL} {NAMED} iters=1 gbs=1").ledger()
    assert unequal(named, scenario(f"{SMALL} precision=bf16 iters=1 gbs=1").ledger()) == []


@pytest.mark.release
def test_layers_of_a_hybrid_model_are_in_fp8_by_their_number(scenario):
    """Its specification has one class for all layers of a kind: two layers whose ends are in bf16 have none in FP8."""
    short = f"{HYBRID} model.hybrid_layer_pattern=MM iters=1"
    words = [f"{short} {NAMED}", f"{short} precision=bf16", f"{short} {TENSORWISE}"]
    named, plain, fp8 = (scenario(word, "tp=1").ledger()[0].gradients for word in words)
    assert named == plain != fp8


@pytest.mark.release
def test_a_run_goes_on_in_another_layout(shared, scenario):
    more = "iters=4 ledger.state_digests=1 optimizer.use_distributed_optimizer=true"
    words = f"{SMALL} {TENSORWISE} {more}".split()
    saved = shared("train", *words, "tp=2", "save=2", "train.exit_interval=2", "run.dir=resumed-fp8")
    assert saved.status == 0, saved.stderr
    shared("train", "--resume", "resumed-fp8", "tp=1", "pp=2", "train.exit_interval=null", status=0)
    assert unequal(shared.ledger("resumed-fp8"), scenario(SMALL, TENSORWISE, more).ledger()) == []


def test_a_recipe_whose_precision_is_one_of_bridges_has_its_name(bridge):
    """What tpi then takes by name (settings/low_precision.py), with the fields of FP8 that Bridge gives it."""
    from megatron.bridge.training.mixed_precision import bf16_mixed, get_mixed_precision_config

    from tp_invariant_recipes.settings import low_precision
    from tp_invariant_recipes.sources import recipe_fields

    plain = bf16_mixed()
    for name, fields in low_precision.NAMED.items():
        precision = get_mixed_precision_config(name)
        assert recipe_fields.precision(precision) == name
        assert {key: getattr(precision, key) for key in fields} == fields
        changed = {key for key, value in vars(precision).items() if value != getattr(plain, key)}
        kept = set(low_precision.FP8_WEIGHTS) if name in low_precision.KEEPING else set()
        kept |= {low_precision.REUSED} if "mxfp8" in name else set()
        assert changed <= fields.keys() | kept  # nothing else that a run with invariant numerics would lose
        assert bool(changed & kept) == bool(kept)
        precision.grad_reduce_in_fp32 = False
        assert recipe_fields.precision(precision)["fp8_recipe"] == fields["fp8_recipe"]
