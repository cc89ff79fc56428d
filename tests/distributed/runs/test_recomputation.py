# SPDX-License-Identifier: Apache-2.0
"""What Megatron and Bridge have otherwise here: recomputation on a CPU, and who writes YAML."""

import pytest
import torch

from tp_invariant_recipes.config import container
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.cpu_host import cpu
from tp_invariant_recipes.replacement import applied
from tp_invariant_recipes.training import rank

pytestmark = pytest.mark.usefixtures("bridge")


def _masked(x):
    return x * torch.triu(torch.ones(4, 4, device="cuda"))  # as Megatron's causal masks


# The square's gradient is of what it has read, so that this must be there again.
def _whole(x):
    from megatron.core.tensor_parallel.random import checkpoint

    return checkpoint(_masked, False, x).square()


def _without_output(x, read=lambda out: None):
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    layer = CheckpointWithoutOutput()
    out = layer.checkpoint(_masked, x)
    after = out.square()
    read(out)
    layer.discard_output_and_register_recompute(after)
    assert out.untyped_storage().nbytes() == 0 or out.isnan().all()
    return after


def _read_by_numpy(x):
    """As a loop of numba does, or a digest: torch cannot resize that memory any more."""
    return _without_output(x, lambda out: out.detach().numpy())


@pytest.mark.parametrize("recomputed", (_whole, _without_output, _read_by_numpy))
def test_a_recomputed_layer_has_the_gradients_of_one_that_kept_its_activations(recomputed):
    gradients = []
    with cpu.installed():
        for layer in (lambda x: _masked(x).square(), recomputed):
            x = torch.arange(16.0).view(4, 4).div(16).requires_grad_()
            torch.autograd.backward(layer(x), grad_tensors=torch.ones(4, 4))
            gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert gradients[0].triu(1).any()


@pytest.mark.parametrize("words", (("qwen3_toy",), ("deepseek_v3_toy", "tp=2", "peft=lora", "logging=wandb")))
def test_libyaml_writes_the_same_text(tmp_path, words):
    import yaml

    model, *overrides = words
    adapted = [*overrides, "model.moe_router_bias_update_rate=0", "checkpoint.pretrained_checkpoint=x"]
    built = container.build(compose(model, adapted if overrides else (), device="cpu").config)
    before = yaml.SafeDumper
    built.to_yaml(str(tmp_path / "python.yaml"))
    with applied([rank.YAML_WRITER]):
        assert yaml.SafeDumper is not before
        built.to_yaml(str(tmp_path / "libyaml.yaml"))
    assert yaml.SafeDumper is before
    assert (tmp_path / "libyaml.yaml").read_bytes() == (tmp_path / "python.yaml").read_bytes()
