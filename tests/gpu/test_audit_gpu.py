# SPDX-License-Identifier: Apache-2.0
"""`tpi audit` on a GPU: replayed graphs, FP8 and Transformer Engine's layers are within rounding."""

import json

import pytest

from tests.gpu.commands import tpi
from tp_invariant_recipes.patches import te_grouped

pytestmark = pytest.mark.gpu

TOY = ("qwen3_toy", "gbs=4", "seq=128")
NEMOTRON = (
    "nemotron3_nano_0p1b",
    "cuda_graph=te",
    "precision=fp8_tensorwise",
    "model.moe_expert_capacity_factor=1.0",
    "model.moe_pad_expert_input_to_capacity=true",
    "model.gradient_accumulation_fusion=true",
    "gbs=4",
    "iters=6",
)
WITHOUT_THE_FIX = f"patches.off=[{te_grouped.PATCH.name}]"


def audit(folder, *arguments: str) -> tuple[int, dict, str]:
    """Exit status, what was found (nothing if it is 2), and what was said."""
    done = tpi(folder, "audit", *arguments, "--dir", "audit", "--json")
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


@pytest.mark.parametrize("kind", ("off", "te", "full"))
def test_a_layout_of_one_gpu_is_within_rounding(tmp_path, kind):
    status, result, message = audit(tmp_path, *TOY, f"cuda_graph={kind}")
    assert status == 0, f"{message}\n{result.get('text')}"
    kinds = {tensor["kind"] for tensor in result["tensors"]}
    assert {"gradients", "norm", "updates"} <= kinds
    if kind == "off":
        assert {"weights", "forward", "backward"} <= kinds


def test_another_model_is_beyond_rounding(tmp_path):
    status, result, message = audit(tmp_path, *TOY[:2], "cuda_graph=off", "--against", "model.rotary_base=100")
    assert status == 1, message
    assert result["first"]["module"] == "rotary_pos_emb"


def test_experts_of_nemotron_keep_their_gradients_in_fp8(tmp_path):
    status, result, message = audit(tmp_path, *NEMOTRON)
    assert status == 0, f"{message}\n{result.get('text')}"
    assert any(".experts." in tensor["name"] for tensor in result["tensors"])


@pytest.mark.skipif(
    te_grouped.PATCH.verdict().state != "applies", reason="this Transformer Engine does without the fix"
)
def test_without_the_fix_they_do_not(tmp_path):
    """A toy's gradients in FP8 move by much with any rounding, so that their norm alone is beyond it."""
    status, result, message = audit(tmp_path, *NEMOTRON, WITHOUT_THE_FIX)
    assert status == 1, f"{message}\n{result.get('text')}"
    assert result["first"]["kind"] == "norm"
    gradients = [tensor for tensor in result["tensors"] if tensor["kind"] == "gradients"]
    assert ".experts." in max(gradients, key=lambda item: item["factor"])["name"]
