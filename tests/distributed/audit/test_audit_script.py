# SPDX-License-Identifier: Apache-2.0
"""The program of `tpi audit --all --script`: a layer of Megatron-Core alone shows its fault, and a sound one none."""

import subprocess
import sys

import pytest

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.features.audit import script

FC2 = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc2"


def test_importing_it_replaces_nothing(bridge):
    from megatron.core.tensor_parallel import layers

    from tp_invariant_recipes.features.audit import module_alone

    assert module_alone.layers is layers
    assert layers.RowParallelLinear.forward.__module__ == layers.__name__


@pytest.mark.release
@pytest.mark.parametrize(
    "words, module, status, says",
    (
        ("qwen3_toy tp=2", "decoder.layers.0.mlp.linear_fc1", 0, "0 of the module's gradients are wrong on 2 ranks"),
        ("qwen3_moe_toy tp=2 ep=2", FC2, 0, "0 of the module's gradients are wrong on 2 ranks"),
        ("qwen3_moe_toy tp=2 model.add_bias_linear=true", FC2, 1, "linear_fc2.bias is wrong by 100.0%, ratio 2"),
    ),
)
def test_it_ends_with_the_verdict_of_its_layer(tmp_path, words, module, status, says):
    model, *settings = words.split()
    config = compose(model, [*settings, "numerics=stock", "precision=fp32", "seq=32", "gbs=2"], device="cpu").config
    program = tmp_path / "layer.py"
    program.write_text(script.text(config, settings, f"gradients {module}.weight"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(torchrun, capture_output=True, text=True)
    assert bool(done.returncode) == bool(status), done.stderr[-3000:]
    assert says in done.stdout
