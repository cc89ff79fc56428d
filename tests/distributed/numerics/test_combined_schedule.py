# SPDX-License-Identifier: Apache-2.0
"""Megatron's combined schedule, which overlaps the all-to-alls of experts with the next micro-batch, changes no bit.

CPU ranks run it in program order: streams are stand-ins there. It frees activations as on a GPU.
"""

import json

import pytest

from tests.distributed.commands.test_bisect import wrong_output
from tests.distributed.scenario import unequal
from tests.distributed.small_models import GATHER, small

EXPERTS = f"{small('qwen3_moe_toy')} iters=3 gbs=8 save=0 ledger.digests=1 ledger.state_digests=1"
SHARDS = "dp=2 ep=2 numerics.data_shards=4 numerics.expert_groups=2"
BIASES = (
    "model.moe_router_enable_expert_bias=true model.moe_router_score_function=sigmoid "
    "model.moe_router_load_balancing_type=none"
)
CAPACITY = "model.moe_expert_capacity_factor=1.0 model.moe_z_loss_coeff=0.001"
STAGES = "pp=2 model.num_layers=4 model.virtual_pipeline_model_parallel_size=2 model.overlap_p2p_comm=true"
SELECTIVE = "model.recompute_granularity=selective model.recompute_modules=[layernorm,core_attn]"
ROWS = (
    f"{EXPERTS} {SHARDS} {GATHER} {BIASES}",
    f"{EXPERTS} tp=2 ep=2 mbs=2 model.moe_shared_expert_intermediate_size=128",
)
MORE = (
    f"{EXPERTS} {SHARDS} model.mtp_num_layers=1 validation.eval_iters=1 validation.eval_interval=1",
    f"{EXPERTS} {SHARDS} model.moe_layer_freq=[0,1] model.moe_router_load_balancing_type=global_aux_loss",
    f"{EXPERTS} {SHARDS} precision=fp8_tensorwise seq=128 {SELECTIVE}",
    f"{EXPERTS} tp=2 dp=2 ep=4 numerics.expert_groups=1 {CAPACITY}",
    f"{EXPERTS} cp=2 dp=2 ep=4 numerics.data_shards=4 numerics.expert_groups=4",
    f"{EXPERTS} dp=2 ep=2 {STAGES} model.batch_p2p_comm=false",
    f"{EXPERTS} dp=2 ep=2 numerics=portable gbs=2 model.high_priority_a2a_comm_stream=true",
    f"{EXPERTS} dp=2 ep=2 numerics=deterministic",
    f"{small('deepseek_v3_toy')} iters=2 gbs=8 dp=2 ep=2 save=0 ledger.digests=1",
    "gpt_oss_toy seq=32 iters=2 gbs=8 dp=2 ep=2 save=0 ledger.digests=1",
    "qwen3_next_toy seq=32 iters=2 gbs=8 dp=2 ep=2 save=0 ledger.digests=1",
)
RUNS = [*ROWS, *(pytest.param(words, marks=pytest.mark.release) for words in MORE)]
ON = "model.overlap_moe_expert_parallel_comm=true"


def no_other_schedule() -> None:
    """Fail a run that computes a backward pass of a whole model."""
    from megatron.core.pipeline_parallel import schedules

    schedules.backward_step = None


def backwards() -> None:
    """Have the schedule take the micro-batches of a step from the last to the first."""
    from megatron.core.pipeline_parallel import schedules

    schedule = schedules.combined_1f1b_schedule_for_no_pipelining

    def reversed_schedule(step, data, model, count, *more):
        return schedule(step, iter([next(data) for _ in range(count)][::-1]), model, count, *more)

    schedules.combined_1f1b_schedule_for_no_pipelining = reversed_schedule


@pytest.mark.parametrize("words", RUNS)
def test_a_run_has_the_ledger_of_one_without_overlap(scenario, words):
    run = scenario(words)
    assert unequal(run.ledger(), run(ON).planted(no_other_schedule).ledger()) == []


def test_another_order_of_micro_batches_changes_gradients(scenario):
    run = scenario(EXPERTS, "dp=2 ep=2")
    assert "step 1: gradients" in unequal(run.ledger(), run(ON).planted(backwards).ledger())


@pytest.mark.release
def test_a_run_is_scored_and_bisected_without_overlap(tpi):
    """A score has no second micro-batch and asks for no EP ranks; a trace reads whole layers."""
    words, name = f"{EXPERTS} {SHARDS} {ON} iters=2 save=1".split(), "decoder.layers.1.self_attention.linear_proj"
    plant = wrong_output(2, name, tp=2)
    tpi("train", *words, "run.dir=a", before=plant, status=0)
    tpi("train", *words, "tp=2", "run.dir=b", before=plant, status=0)
    (tpi.folder / "s.jsonl").write_text(json.dumps({"tokens": [*range(9)]}))
    tpi("score", "a", "s.jsonl", status=0)
    found = tpi("bisect", "a", "b", "--dir", "bisect", before=plant, status=1)
    assert f"different at step 2: forward of {name}: output differs" in found.stdout
    assert "does not repeat" not in found.stdout
    assert "traced-a: a from step 1" in found.stderr
