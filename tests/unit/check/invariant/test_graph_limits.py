"""CUDA graphs with invariant numerics: what is captured, what is refused by name, and what a capture falls back to."""

import pytest
import torch

from tests.rules import limits_of
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.numerics.products import cublas, defined
from tp_invariant_recipes.settings.run_config import RunConfig

COVERED = (
    "qwen3_toy cuda_graph=full",
    "qwen3_toy cuda_graph=full tp=2 dp=2 gbs=4",
    "qwen3_toy cuda_graph=full cp=2",
    "qwen3_toy cuda_graph=te pp=2",
    "qwen3_moe_toy cuda_graph=te tp=2 ep=2",
    "qwen3_moe_toy cuda_graph=full dp=2 ep=2 gbs=2",
    "qwen3_moe_toy cuda_graph=full cp=2 seq=256",
    "nemotron3_nano_toy cuda_graph=te tp=2",
    "moonlight_toy cuda_graph=te",
    "qwen3_toy cuda_graph=full numerics=portable",
    "qwen3_next_toy cuda_graph=full model.mtp_num_layers=null model.num_moe_experts=null",
)


def composed(words: str):
    model, *overrides = words.split()
    return compose(model, overrides, device="gpu").config.sections


@pytest.mark.parametrize("words", COVERED)
def test_what_was_captured_is_allowed(words):
    assert composed(words)["model"]["cuda_graph_impl"] != "none"


REFUSED = {
    "numerics=portable": "numerics=portable: experts have not been captured",
    "numerics=tree pp=2": "numerics=tree: stages wait for each other",
    "numerics=tree guard=products": "numerics=tree: guard=products samples no product of experts",
    "numerics=tree precision=fp8_tensorwise": "numerics=tree: experts in FP8 or with biases wait",
    "numerics=tree model.add_bias_linear=true": "numerics=tree: experts in FP8 or with biases wait",
    "numerics=stock": "experts get another number of tokens at every step; model.moe_expert_capacity_factor=1.0",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_step_with_experts_is_not_captured_whole(words):
    with pytest.raises(ConfigError, match=REFUSED[words]):
        composed(f"qwen3_moe_toy cuda_graph=full {words}")


def test_the_invariant_dispatcher_is_not_captured():
    words = "qwen3_moe_toy cuda_graph=te numerics="
    assert composed(f"{words}tree")["model"]["cuda_graph_modules"] == ["attn", "moe_router"]
    stock = composed(f"{words}stock")
    assert stock["model"]["cuda_graph_modules"] == ["attn", "moe_router", "moe_preprocess"]
    (problem,) = (
        line
        for line in limits_of(RunConfig(stock | composed("qwen3_moe_toy") | {"model": stock["model"]}))
        if "moe_preprocess" in line
    )
    assert "leave them out of model.cuda_graph_modules" in problem


def test_a_capture_tries_nothing_and_remembers_nothing(monkeypatch):
    """Before it, a trial decides; while it lasts, what has been decided holds, and all else is computed as defined."""
    monkeypatch.setattr(defined, "_cublas_is_exact", {})
    trials = []
    monkeypatch.setattr(cublas, "agree", lambda *_: trials.append(1) or True)
    capturing = True
    monkeypatch.setattr(cublas, "capturing", lambda operand: capturing)
    operands = torch.zeros(16, 32), torch.zeros(32, 8), torch.zeros(16, 8)
    assert defined.CHOICES["cuda"](*operands, False) is defined.FIXED_TILES
    assert trials == []
    assert defined._cublas_is_exact == {}
    capturing = False
    assert defined.CHOICES["cuda"](*operands, False) is defined.CUBLAS
    assert len(trials) == 1
    capturing = True
    assert defined.CHOICES["cuda"](*operands, False) is defined.CUBLAS
    assert len(trials) == 1
