"""CUDA graphs on a GPU: what replay computes is what eager code computes, and `tpi audit` sees it where it is not."""

import importlib.util
import json
import subprocess
import sys

import pytest

from tp_invariant_recipes.patches import te_grouped_linear

pytestmark = pytest.mark.gpu

TOY = ("qwen3_toy", "gbs=4", "iters=5")
NEMOTRON = (
    "nemotron3_nano_toy",
    "cuda_graph=te",
    "precision=fp8_tensorwise",
    "model.moe_expert_capacity_factor=1.0",
    "model.moe_pad_expert_input_to_capacity=true",
    "model.gradient_accumulation_fusion=true",
    "gbs=4",
    "iters=6",
)
WITHOUT_THE_FIX = f"patches.off=[{te_grouped_linear.PATCH.name}]"


def audit(folder, *arguments: str) -> tuple[int, dict, str]:
    """Exit status, what was found (nothing if it is 2), and what was said."""
    done = subprocess.run(
        [sys.executable, "-m", "tp_invariant_recipes", "audit", *arguments, "--dir", "audit", "--keep", "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def graphs(folder, training: str) -> list[int]:
    """How many graphs each step replayed."""
    return [json.loads(line)["graphs"] for line in (folder / "audit" / training / "audit" / "norms.jsonl").open()]


@pytest.mark.parametrize("kind", ("te", "full"))
def test_replay_computes_the_gradients_of_eager_code(tmp_path, kind):
    status, found, said = audit(tmp_path, *TOY, f"cuda_graph={kind}")
    assert status == 0, said
    assert graphs(tmp_path, "eager") == [0] * 5
    assert graphs(tmp_path, "replayed")[:3] == [0] * 3
    assert all(graphs(tmp_path, "replayed")[3:])
    assert found["remarks"] == []  # the steps before repeat themselves to the last bit


def test_other_gradients_are_other_gradients(tmp_path):
    status, found, said = audit(tmp_path, *TOY, "--against", "model.rotary_base=100")
    assert status == 1, said
    assert "attention" in {group["name"] for group in found["groups"] if group["state"] == "different"}


needs_fusion = pytest.mark.skipif(
    importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None,
    reason="Megatron-Core adds weight gradients in place with Apex's fused_weight_gradient_mlp_cuda only",
)


@needs_fusion
def test_experts_of_nemotron_keep_their_gradients_in_fp8(tmp_path):
    status, found, said = audit(tmp_path, *NEMOTRON)
    assert status == 0, f"{said}\n{found.get('text')}"
    assert {"experts", "router", "shared expert", "Mamba", "attention"} <= {group["name"] for group in found["groups"]}


@needs_fusion
@pytest.mark.skipif(
    te_grouped_linear.PATCH.verdict().state != "applies", reason="this Transformer Engine does without the fix"
)
def test_without_the_fix_they_do_not(tmp_path):
    status, found, said = audit(tmp_path, *NEMOTRON, WITHOUT_THE_FIX)
    assert status == 1, f"{said}\n{found.get('text')}"
    different = {group["name"]: group for group in found["groups"] if group["state"] == "different"}
    assert different["experts"]["median"] < 0.8
    at_once = {name for name, group in different.items() if group["since"] == 4}
    assert at_once == {"experts"}  # others follow, if any, with the weights
