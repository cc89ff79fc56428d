# SPDX-License-Identifier: Apache-2.0
"""What export reads of a checkpoint and how it writes files. On a CPU no layer of a model has an extra state."""

import json

import pytest
import torch

from tests import hf_folders
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.features.export import rank, workflow
from tp_invariant_recipes.sources import hf_models
from tp_invariant_recipes.training import saved_weights
from tp_invariant_recipes.training.saved_weights import is_weight

FC1 = "decoder.layers.0.mlp.experts.linear_fc1"


def test_states_of_layers_are_no_weights_and_all_else_is():
    for name in ("_extra_state", f"{FC1}._extra_state", f"{FC1}._extra_state12"):
        assert not is_weight(name)
    for name in (f"{FC1}.weight0", f"{FC1}.weight12", "output_layer.weight", "x._extra_state.weight"):
        assert is_weight(name)


def test_a_tensor_larger_than_a_file_has_one_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(rank, "SHARD", 8)
    (tmp_path / "config.json").write_text("{}")
    tensors = {"large": torch.ones(4), "a": torch.ones(1), "b": torch.ones(1)}
    rank.write(tmp_path, tensors.items(), {n: tuple(t.shape) for n, t in tensors.items()}, torch.float32)
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"a": files[1], "b": files[1], "large": files[0]}
    assert sorted(file.name for file in tmp_path.glob("*.safetensors")) == files


@pytest.mark.parametrize("layers", ((), ((0, 1, 4),)))
def test_the_adapter_of_all_experts_lies_where_those_of_each_have_their_dimension(layers):
    """With and without a dimension of layers before that of experts."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    def placed(*before):
        return ShardedTensor.from_rank_offsets("adapter", torch.ones(6, 2), *before, prepend_axis_num=len(before))

    each, shared = placed(*layers, (len(layers), 3, 8)), placed(*layers)
    of_all = saved_weights.of_all_experts(each)
    for name in ("global_shape", "global_offset", "axis_fragmentations", "prepend_axis_num", "local_shape"):
        assert getattr(of_all, name) == getattr(shared, name), name


def test_every_file_of_the_tokenizer_is_copied_and_no_format_of_other_weights(tmp_path):
    config = compose("qwen3_toy", ["numerics=stock"], device="cpu").config
    source = hf_folders.make(tmp_path / "hf", config.model)
    names = ["additional_chat_templates/tool.jinja", "chat_template.jinja", "generation_config.json", "merges.txt"]
    names += ["special_tokens_map.json", "spiece.model", "tokenizer.model", "vocab.bpe"]
    for name in [*names, "README.md"]:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    before = json.loads((source / "config.json").read_text())
    added = {"quantization_config": {"quant_method": "gptq"}, "compression_config": {}, "torch_dtype": "float16"}
    (source / "config.json").write_text(json.dumps(before | added))
    config = config.with_fields("weights", folder=str(source))
    (tmp_path / "out").mkdir()
    family = hf_models.family_of(config.model)
    copied = workflow._describe(tmp_path / "out", config, family, masters=False)
    assert sorted(copied) == names
    assert all((tmp_path / "out" / name).read_text() == name for name in names)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == before
