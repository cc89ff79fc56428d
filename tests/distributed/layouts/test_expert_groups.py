"""One ledger for experts over ep, dp, tp, pp, cp and mbs with 1, 2 and 4 expert groups, end to end.

Which terms each layout adds in which order: tests/unit/numerics/sums/test_group_order.py.
"""

import pytest

from tests.distributed.scenario import STOCK, agree, stock_differs, unequal
from tests.distributed.small_models import small
from tests.ledgers import steps

# In `make test`: numerics/experts/test_expert_sources.py.
pytestmark = [pytest.mark.release, pytest.mark.timeout(2400)]

MOE = small("qwen3_moe_toy")
BUCKETS = "ddp.overlap_grad_reduce=true ddp.bucket_size=20000 optimizer.use_distributed_optimizer=true"
FIXED = "iters=2 gbs=8 numerics.data_shards=4"
# Groups -> layouts. Two sequences a data shard, so that shards of a rank take turns.
GROUPS = {
    1: ("dp=1", "dp=1 tp=2 ep=2 mbs=2", "dp=2 ep=2 pp=2", f"dp=2 ep=4 tp=2 {BUCKETS}", f"dp=4 ep=4 {BUCKETS}"),
    2: ("dp=1", "dp=2", f"dp=2 ep=2 {BUCKETS}", "dp=2 ep=2 tp=2", "dp=4 ep=2 mbs=2"),
    4: ("dp=1", "dp=2 pp=2", "dp=2 ep=2", "dp=4", f"dp=4 ep=4 {BUCKETS}"),
}
CUT = "seq=64 iters=2 gbs=4 numerics.data_shards=2 numerics.context_shards=2"
CONTEXTS = {
    1: ("cp=1", "cp=2 ep=2", "cp=1 tp=2 ep=2", "cp=2 dp=2 ep=4 mbs=2"),
    2: ("cp=1 dp=2", "cp=2 dp=2 ep=2", "cp=2 ep=2 pp=2"),
    4: ("cp=1", "cp=2 dp=1", "cp=2 dp=2", "cp=2 dp=2 ep=4"),
}


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("more", ("", "model.moe_router_load_balancing_type=global_aux_loss"))
def test_one_ledger_for_all_layouts(scenario, groups, more):
    agree(scenario(MOE, FIXED, more, f"numerics.expert_groups={groups}"), GROUPS[groups])


@pytest.mark.parametrize("groups", CONTEXTS)
def test_one_ledger_with_context_shards(scenario, groups):
    agree(scenario(MOE, CUT, f"numerics.expert_groups={groups}"), CONTEXTS[groups])


IN_128 = """
    qwen3_moe_toy seq=128 numerics.virtual_shards=1 model.num_layers=1 model.hidden_size=128 model.num_attention_heads=4
    model.num_query_groups=4 model.kv_channels=32 model.ffn_hidden_size=128 model.moe_ffn_hidden_size=128
    model.vocab_size=512
"""
KINDS = {
    "fp8 by tensors": f"{IN_128} precision=fp8_tensorwise model.num_moe_experts=8",
    # The sums of many tokens keep 13 bits and have scales that are powers of two, so fp32 adds them exactly.
    "fp8 by blocks": f"{IN_128} precision=fp8_blockwise model.num_moe_experts=64",
    "portable": f"{MOE} numerics=portable",
    "hybrid with capacity": f"{small('nemotron3_nano_toy')} model.moe_expert_capacity_factor=1.0 "
    "model.moe_pad_expert_input_to_capacity=true",
    "mxfp8": f"{MOE} precision=mxfp8",
    "biases": "gpt_oss_toy model.num_layers=1",
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_ledger_for_kinds_of_experts(scenario, kind):
    agree(scenario(KINDS[kind], FIXED, "numerics.expert_groups=1"), ("dp=1", "dp=2 ep=2", "dp=4 ep=4"))


STACKED = "iters=1 model.num_layers=1 ledger.experts=together"


@pytest.mark.parametrize("words, layouts", (("gbs=4", ("dp=2", "dp=2 ep=2")), (STACKED, ("tp=1", "tp=2 ep=2"))))
def test_stock_does_not(scenario, words, layouts):
    stock_differs(scenario(MOE, "iters=1", words), layouts)


def test_stacked_experts_have_one_digest_in_every_layout(scenario):
    runs = scenario(MOE, STACKED)
    agree(runs, ("tp=1", "tp=2 ep=2"))
    parameters = {parameter.name: parameter for parameter in runs("tp=1").header().parameters}
    assert parameters["decoder.layers.0.mlp.experts.*.linear_fc2.weight"].shape[0] == 8
    assert not [name for name in parameters if ".experts.0." in name]
    assert set(parameters) >= {"decoder.layers.0.mlp.router.weight", "embedding.word_embeddings.weight"}


@pytest.mark.parametrize(
    "first, then", (("dp=4 ep=4", "dp=2 ep=2"), ("dp=1 ep=1", "dp=2 ep=2"), ("dp=2 ep=2", "ep=1 dp=1"))
)
def test_a_run_goes_on_with_another_ep(tpi, first, then):
    tpi("train", *f"{MOE} {FIXED} iters=4 save=2 {first}".split(), "run.dir=run", status=0)
    whole = steps(tpi.folder / "run")
    tpi("train", "--resume", "run", *then.split(), "checkpoint.ckpt_step=2", status=0)
    assert steps(tpi.folder / "run") == whole


def test_more_places_than_groups_are_refused_at_a_resume(tpi):
    tpi("train", *f"{MOE} {FIXED} save=1 dp=2 ep=2".split(), "run.dir=run", status=0)
    refused = tpi("train", "--resume", "run", "ep=1", "checkpoint.ckpt_step=1", status=2)
    assert (
        "numerics.expert_groups=1: at tp=1 cp=1 dp=2 ep=1 a run adds an expert's gradient in 2 places" in refused.stderr
    )


@pytest.mark.parametrize("layout", ("dp=2 tp=2 ep=2 gbs=8 numerics.data_shards=4", "dp=4 ep=2 gbs=8"))
def test_a_guards_shadow_steps_follow_the_order(scenario, layout):
    guarded = scenario(MOE, "iters=2", layout)
    plain = guarded("guard=off")
    assert unequal(guarded("guard=shadow guard.every=1").ledger(), plain.ledger()) == []


def test_runs_of_other_groups_are_not_compared(scenario):
    moe = scenario(MOE, "iters=1 gbs=4 dp=2 ep=2")
    message = moe("numerics.expert_groups=1").compared(moe("numerics.expert_groups=2"), status=2)
    assert (
        "numerics.expert_groups is 1 and 2; train both with numerics.expert_groups=2" in message.stdout + message.stderr
    )
    moe("numerics.expert_groups=1").compared(moe(STOCK), status=1)
