# SPDX-License-Identifier: Apache-2.0
"""The trainings that `tpi audit` plans, on a machine that could carry them."""

import pytest

from tp_invariant_recipes.features.audit import workflow as audit
from tp_invariant_recipes.launch import plan

pytestmark = pytest.mark.usefixtures("bridge", "here")


@pytest.fixture
def a_gpu(monkeypatch):
    """A machine that could carry any run on GPUs."""
    monkeypatch.setattr(plan, "detect_device", lambda: "gpu")
    monkeypatch.setattr(plan, "check_start", lambda start: [])


NEMOTRON = (
    "cuda_graph=te", "precision=fp8_tensorwise", "model.moe_expert_capacity_factor=1.0",
    "model.moe_pad_expert_input_to_capacity=true", "model.gradient_accumulation_fusion=true", "gbs=4",
)  # fmt: skip


def test_a_reference_replays_nothing_and_graphs_are_judged_where_they_are_replayed(a_gpu):
    planned = audit.new("nemotron3_nano_toy", NEMOTRON)
    assert planned.audited.config.model["cuda_graph_modules"] == ["attn", "mamba", "moe"]
    assert planned.reference.config.model["cuda_graph_impl"] == "none"
    assert planned.reference.config.model["gradient_accumulation_fusion"] is False
    assert planned.steps == range(5, 6)  # three warm-up steps, one that captures, one that replays
    sections = [run.config.sections for run in (planned.audited, planned.reference)]
    for name in ("optimizer", "dataset", "scheduler"):
        assert sections[0][name] == sections[1][name]


def test_steps_are_those_asked_for_and_enough_to_replay_one(a_gpu):
    for asked in (("iters=7",), ("train.train_iters=7",)):
        assert audit.new("qwen3_toy", ["cuda_graph=full", *asked]).steps == range(5, 8)
    assert audit.new("qwen3_toy", ["cuda_graph=te", "model.cuda_graph_warmup_steps=1"]).steps == range(3, 4)
    with pytest.raises(audit.ConfigError, match="replayed from step 5 on, and there are 3; iters=5"):
        audit.new("qwen3_toy", ["cuda_graph=te", "iters=3"])


def test_weights_that_are_gathered_late_take_a_second_step(a_gpu):
    late = ["dp=2", "gbs=2", "cuda_graph=off", "ddp.overlap_param_gather=true", "optimizer.overlap_param_gather=true"]
    assert audit.new("qwen3_toy", [*late, "ddp.overlap_grad_reduce=true"]).steps == range(1, 3)
    assert audit.new("qwen3_toy", ["tp=2", "cuda_graph=off"]).steps == range(1, 2)


@pytest.mark.parametrize("words", ("tp=2", "model.tensor_model_parallel_size=2", "dp=2 gbs=2", "pp=2", "cp=2 seq=64"))
def test_a_reference_has_one_rank_however_a_key_is_spelled(a_gpu, words):
    planned = audit.new("qwen3_toy", [*words.split(), "cuda_graph=off"])
    assert (planned.audited.layout.world, planned.reference.layout.world) == (2, 1)


def test_what_is_wrong_with_a_reference_is_reported_and_no_other_is_taken(a_gpu):
    with pytest.raises(audit.ConfigError, match=r"the reference: sp=true needs tp > 1"):
        audit.new("qwen3_toy", ["tp=2", "cuda_graph=off"], reference=["sp=true"])


def test_the_smallest_reference_that_fits_is_taken(a_gpu, monkeypatch):
    def problems(config, here):
        return ["too large"] * (config.model["tensor_model_parallel_size"] < 4)

    monkeypatch.setattr(audit.available_memory, "problems", problems)
    planned = audit.new("qwen3_toy", ["tp=8", "cuda_graph=off"])
    assert planned.reference.layout.tp == 4


def test_a_disk_that_cannot_hold_the_recordings_is_refused_before_the_start(a_gpu, monkeypatch):
    planned = audit.new("qwen3_toy", ["tp=2", "cuda_graph=off"])
    assert planned.disk > 2 * sum(planned.recordings)  # three repetitions of the reference
    monkeypatch.setattr(audit, "free_bytes", lambda path: planned.disk)
    audit.new("qwen3_toy", ["tp=2", "cuda_graph=off"])
    monkeypatch.setattr(audit, "free_bytes", lambda path: planned.disk - 1)
    with pytest.raises(audit.RunError, match=r"records about .* GiB, and the disk of .* --dir PATH on another disk"):
        audit.new("qwen3_toy", ["tp=2", "cuda_graph=off"])
