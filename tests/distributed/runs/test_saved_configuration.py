"""What a save writes of the configuration: libyaml writes the text that Python does."""

import pytest

from tp_invariant_recipes.config import container
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.replacement import applied
from tp_invariant_recipes.training import rank


@pytest.mark.parametrize("words", (("qwen3_toy",), ("deepseek_v3_toy", "tp=2", "peft=lora", "logging=wandb")))
def test_libyaml_writes_the_same_text(bridge, tmp_path, words):
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
