# SPDX-License-Identifier: Apache-2.0
"""What single modes and CUDA graphs set and cover."""

import pytest
import torch

from tests.rules import limits_of
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.numerics.gemm import cublas, defined
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
    assert defined._on_gpu(*operands, False) is defined.by_fixed_tile_gemm
    assert trials == []
    assert defined._cublas_is_exact == {}
    capturing = False
    assert defined._on_gpu(*operands, False) is cublas.launch
    assert len(trials) == 1
    capturing = True
    assert defined._on_gpu(*operands, False) is cublas.launch
    assert len(trials) == 1


@pytest.mark.parametrize("model", ("qwen3_toy", "qwen3_8b", "qwen3_moe_toy"))
def test_a_gpu_has_the_layers_and_the_optimizer_of_a_cpu(model):
    """Whatever device=gpu sets otherwise: Transformer Engine's have a library's arithmetic."""
    trees = [compose(model, ["numerics=portable", "cuda_graph=off"], device=device).config for device in ("cpu", "gpu")]
    differing = {"distributed_backend", "kind"}
    for section in ("model", "optimizer", "ddp", "numerics"):
        first, second = (tree.section(section) for tree in trees)
        assert {name for name in {*first, *second} if first.get(name) != second.get(name)} <= differing, section


LORA = "peft=lora checkpoint.pretrained_checkpoint=base tp=2 peft.dim=16"
# Toys are trained: tests/distributed/layouts.
COVERED = (
    "qwen3_0p6b numerics=portable tp=2",
    *(f"{model} tp=8 dp=2 ep=16 gbs=2" for model in ("deepseek_v3", "moonlight_16b_a3b", "kimi_k2")),
    *(f"{model} {at}" for model in ("qwen3_30b_a3b", "nemotron3_nano") for at in ("tp=2 ep=2", "dp=2 ep=2 gbs=2")),
    *(f"{model} {LORA}" for model in ("qwen3_8b", "llama32_1b", "qwen25_7b")),
)


@pytest.mark.parametrize("words", COVERED)
def test_models_that_are_covered(words):
    composed(words)
