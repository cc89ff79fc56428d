"""LoRA of experts: one adapter for all experts of a layer, and one for each, have one ledger in all layouts.

In `make test`: test_lora_kinds.py.
"""

import pytest

from tests.distributed.finetuning.test_lora_kinds import FIXED, _adapted, _first
from tests.distributed.scenario import Scenario, agree, unequal
from tests.distributed.small_models import small

pytestmark = pytest.mark.timeout(1200)

WORDS = f"{FIXED} peft.lora_B_init_method=normal"
KINDS = {"shared": "peft.share_expert_adapters=true", "each": "peft.share_expert_adapters=false"}
DATA = "gbs=2 numerics.data_shards=2"
# Two shards of a group take turns on a rank, or come from two ranks.
GROUPS = "gbs=4 numerics.data_shards=4 numerics.expert_groups=2"
LAYOUTS = (
    ("tp=1", "tp=2", "tp=4 ep=2", "pp=2"),
    (DATA, f"{DATA} dp=2", f"{DATA} dp=2 ep=2", f"{DATA} dp=2 tp=2 ep=4"),
    (GROUPS, f"{GROUPS} dp=2", f"{GROUPS} dp=2 ep=2", f"{GROUPS} dp=4 ep=2"),
)


def _experts(tpi, words: str = "", model: str = "qwen3_moe_toy") -> Scenario:
    return _adapted(tpi, model, f"{WORDS} {words}")


@pytest.mark.release
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_other_layouts_have_it_too(shared, kind, layouts):
    agree(_experts(shared, f"{KINDS[kind]} iters=2"), layouts)


@pytest.mark.release
def test_both_kinds_differ(shared):
    first, other = (_experts(shared, f"{kind} iters=2")("tp=1").ledger() for kind in KINDS.values())
    assert first[0].gradients.keys() == other[0].gradients.keys()
    assert unequal(first, other)


@pytest.mark.release
def test_adapters_of_shared_experts_are_trained_too(shared):
    latent = _experts(shared, "iters=1", model="deepseek_v3_toy")
    agree(latent, ("tp=1", "tp=2 ep=2"))
    assert any("mlp.shared_experts.linear_fc1.adapter" in name for name in latent("tp=1").ledger()[0].gradients)


def _plain_sum_over_ranks() -> None:
    """What a rank has of all experts, one after the other, then the ranks' sums: as Bridge's all-reduce adds."""
    from tp_invariant_recipes.numerics.layers.experts import expert_adapters

    expert_adapters.tree_sum = lambda partials, *_: sum(partials[1:], start=partials[0])


@pytest.mark.release
def test_the_tree_over_experts_is_needed(shared):
    experts = _experts(shared, "iters=1")
    first, second = (experts(at).planted(_plain_sum_over_ranks).ledger() for at in ("tp=1", "tp=2 ep=2"))
    assert unequal(first, second)


@pytest.mark.release
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_in_another_layout(shared, kind):
    words = f"{KINDS[kind]} {DATA} save=1 iters=2"
    whole = _experts(shared, words)("tp=1")
    whole.ledger()
    split = "dp=2 ep=2 optimizer.use_distributed_optimizer=true ddp.overlap_grad_reduce=false train.exit_interval=1"
    first = f"{small('qwen3_moe_toy')} {WORDS} {words} {split}"
    run = f"parts-{kind}"
    shared("train", *first.split(), "checkpoint.pretrained_checkpoint=qwen3_moe_toy/checkpoints", f"run.dir={run}",
           status=0)  # fmt: skip
    shared("train", "--resume", run, "dp=1", "ep=1", "tp=2", status=0)
    assert shared.ledger(run)[-1] == whole.ledger()[-1]


@pytest.mark.release
def test_experts_in_fp8_have_adapters_too(shared):
    """Both kinds differ, so that neither is left out of the products of experts in FP8."""
    wide = (
        "qwen3_moe_toy seq=128 gbs=1 iters=1 numerics.virtual_shards=2 model.num_layers=1 model.hidden_size=128 "
        "model.num_attention_heads=4 model.num_query_groups=4 model.kv_channels=32 model.ffn_hidden_size=128 "
        "model.moe_ffn_hidden_size=128 model.num_moe_experts=8 model.vocab_size=512"
    )
    first, other = (_first(shared, wide, "", f"{kind} precision=fp8_tensorwise") for kind in KINDS.values())
    agree(first, ("tp=1", "tp=2 ep=2"))
    assert first("tp=1").ledger()[0].loss != other("tp=1").ledger()[0].loss
