# SPDX-License-Identifier: Apache-2.0
"""Megatron's combined schedule, which overlaps the all-to-alls of experts with the next micro-batch, changes no bit.

CPU ranks run it in program order: streams are stand-ins there.
"""

import pytest

from tests.distributed.scenario import unequal
from tests.distributed.small_models import GATHER, small

EXPERTS = f"{small('qwen3_moe_toy')} iters=3 gbs=8 save=0 ledger.digests=1 ledger.state_digests=1"
COMBINED = "model.overlap_moe_expert_parallel_comm=true"
BIASES = (
    "model.moe_router_enable_expert_bias=true model.moe_router_score_function=sigmoid "
    "model.moe_router_load_balancing_type=none"
)
SHARDS = "numerics.data_shards=4 numerics.expert_groups=2"
ROWS = {
    "shards": f"dp=2 ep=2 {SHARDS}",
    "gather": f"dp=2 ep=2 {SHARDS} {GATHER} {BIASES}",
    "tp": "tp=2 ep=2",
    "tpdp": "tp=2 dp=2 ep=4 numerics.expert_groups=1",
    "cp": "cp=2 ep=2",
    "shared": "dp=2 ep=2 model.moe_shared_expert_intermediate_size=128 mbs=2 model.moe_z_loss_coeff=0.001",
    "global": "dp=2 ep=2 model.moe_router_load_balancing_type=global_aux_loss",
    "seq": "dp=2 ep=2 model.moe_router_load_balancing_type=seq_aux_loss",
    "one": "dp=2 ep=2 gbs=2",
    "untied": "dp=2 ep=2 model.share_embeddings_and_output_weights=false numerics.data_shards=8",
    "tied": "dp=2 ep=2 model.share_embeddings_and_output_weights=true numerics.data_shards=8",
    "mtp": "dp=2 ep=2 model.mtp_num_layers=1",
    "mtps": "dp=2 ep=2 model.mtp_num_layers=1 numerics.data_shards=8",
    "dense": "dp=2 ep=2 model.moe_layer_freq=[0,1]",
    "norm": "dp=2 ep=2 model.recompute_granularity=selective model.recompute_modules=[layernorm,moe_act,core_attn]",
    "capacity": "dp=2 ep=2 model.moe_expert_capacity_factor=1.0",
    "fp8": "dp=2 ep=2 precision=fp8_tensorwise",
    "portable": "dp=2 ep=2 numerics=portable",
    "deterministic": "dp=2 ep=2 numerics=deterministic",
}


def counted():
    """Fail the run unless all of its training steps ran the combined schedule."""
    import atexit

    from megatron.core.pipeline_parallel import combined_1f1b, schedules

    original = combined_1f1b.combined_forward_backward_step
    run = schedules.combined_1f1b_schedule_for_no_pipelining

    def schedule(*args, **kwargs):
        open("/tmp/a2a/ran", "a").write("x")
        return run(*args, **kwargs)

    schedules.combined_1f1b_schedule_for_no_pipelining = schedule


@pytest.mark.parametrize("row", ROWS)
def test_bits(scenario, row):
    run = scenario(EXPERTS, ROWS[row])
    assert unequal(run.ledger(), run(COMBINED).planted(counted).ledger()) == []
