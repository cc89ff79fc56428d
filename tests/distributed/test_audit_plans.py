"""The trainings that `tpi audit` plans, on a machine that could carry them."""

import pytest

from tp_invariant_recipes.launch import plan, preflight
from tp_invariant_recipes.workflows import audit

pytestmark = pytest.mark.usefixtures("bridge", "here")


@pytest.fixture
def a_gpu(monkeypatch):
    """A machine that could carry any run on GPUs."""
    monkeypatch.setattr(plan, "detect_device", lambda: "gpu")
    monkeypatch.setattr(preflight, "check", lambda *_, **__: None)


NEMOTRON = (
    "cuda_graph=te",
    "precision=fp8_tensorwise",
    "model.moe_expert_capacity_factor=1.0",
    "model.moe_pad_expert_input_to_capacity=true",
    "model.gradient_accumulation_fusion=true",
    "gbs=4",
)


def test_the_pair_differs_in_nothing_but_when_graphs_are_captured(a_gpu):
    planned = audit.new("nemotron3_nano_toy", NEMOTRON)
    assert list(planned.plans) == ["eager", "replayed", "rounded"]
    assert planned.counts_from == 4
    trees = {name: run.config.sections | {"run": None, "checkpoint": None} for name, run in planned.plans.items()}
    assert trees["eager"] == trees["rounded"]
    assert trees["eager"]["model"].pop("cuda_graph_warmup_steps") == audit.NEVER
    assert trees["replayed"]["model"].pop("cuda_graph_warmup_steps") == 3
    assert trees["eager"] == trees["replayed"]
    assert trees["eager"]["model"]["cuda_graph_modules"] == ["attn", "mamba", "moe"]
    assert trees["eager"]["train"]["train_iters"] == audit.STEPS
    assert len({run.run_dir.path for run in planned.plans.values()}) == 3


def test_steps_are_those_asked_for_and_enough_to_replay_one(a_gpu):
    for asked in (("iters=5",), ("train.train_iters=5",)):
        assert audit.new("qwen3_toy", ["cuda_graph=full", *asked]).first.steps == 5
    assert audit.new("qwen3_toy", ["cuda_graph=te", "model.cuda_graph_warmup_steps=1"], steps=2).counts_from == 2
    with pytest.raises(audit.ConfigError, match="captured after 3 steps, and there are 3; --steps 8"):
        audit.new("qwen3_toy", ["cuda_graph=te"], steps=3)
