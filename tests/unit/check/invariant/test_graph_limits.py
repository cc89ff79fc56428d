"""CUDA graphs with invariant numerics: what is captured, and what a capture falls back to."""

import torch

from tests.rules import limits_of
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.numerics.products import cublas, defined
from tp_invariant_recipes.settings.run_config import RunConfig


def composed(words: str):
    model, *overrides = words.split()
    return compose(model, overrides, device="gpu").config.sections


def test_gated_delta_nets_are_captured_with_the_whole_step():
    words = "qwen3_next_toy cuda_graph=full model.mtp_num_layers=null model.num_moe_experts=null"
    assert composed(words)["model"]["cuda_graph_impl"] == "full_iteration"


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
    assert defined._on_gpu(*operands, False) is defined.by_fixed_tiles
    assert trials == []
    assert defined._cublas_is_exact == {}
    capturing = False
    assert defined._on_gpu(*operands, False) is cublas.launch
    assert len(trials) == 1
    capturing = True
    assert defined._on_gpu(*operands, False) is cublas.launch
    assert len(trials) == 1
