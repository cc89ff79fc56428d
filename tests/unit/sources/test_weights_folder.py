"""`weights=FOLDER`: what is read of a folder, its digest, and every folder that is refused, with the key to change."""

import json

import pytest
import torch

from tests import hf_folders
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.identity import identity
from tp_invariant_recipes.errors import ConfigError, RunError
from tp_invariant_recipes.files import whole_folder
from tp_invariant_recipes.recipes import recipe
from tp_invariant_recipes.sources import auto_bridge, hf_models, weights

TOY = hf_folders.model_section("qwen3_toy")


def _problems(folder, model=TOY):
    try:
        return "\n".join(hf_models.problems(model, weights.read(folder)))
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("name", ("qwen3_toy", "llama32_toy", "qwen25_toy", "qwen3_moe_toy"))
def test_weights_of_the_model_itself_fit(tmp_path, name):
    model = hf_folders.model_section(name, "model.hidden_size=64", "model.num_layers=2")
    assert _problems(hf_folders.make(tmp_path / "a", model | {"moe_ffn_hidden_size": 32}), model | {
        "moe_ffn_hidden_size": 32
    }) == ""  # fmt: skip


def test_the_digest_is_of_tensors_and_not_of_files(tmp_path):
    single = hf_folders.make(tmp_path / "one", TOY)
    three = hf_folders.make(tmp_path / "three", TOY, files=3)
    assert weights.read(single).digest() == weights.read(three).digest()
    assert weights.read(single).digest() != weights.read(hf_folders.make(tmp_path / "other", TOY, seed=1)).digest()


def _name(config, tensors):
    tensors["model.norm.bias"] = tensors.pop("model.norm.weight")


def _bit(config, tensors):
    dtype, shape, data = tensors["model.norm.weight"]
    tensors["model.norm.weight"] = (dtype, shape, bytes([data[0] ^ 1]) + data[1:])


def _shape(config, tensors):
    dtype, (size,), data = tensors["model.norm.weight"]
    tensors["model.norm.weight"] = (dtype, (1, size), data)


def _type(config, tensors):
    _, shape, data = tensors["model.norm.weight"]
    tensors["model.norm.weight"] = ("F16", shape, data)


@pytest.mark.parametrize("change", (_name, _bit, _shape, _type))
def test_the_digest_has_names_types_shapes_and_bits(tmp_path, change):
    before = weights.read(hf_folders.make(tmp_path / "before", TOY)).digest()
    assert weights.read(hf_folders.make(tmp_path / "after", TOY, change=change)).digest() != before


def test_a_file_that_is_rewritten_is_reread(tmp_path):
    folder = hf_folders.make(tmp_path / "a", TOY)
    before = weights.read(folder).digest()
    (folder / "model.safetensors").write_bytes(hf_folders.file(hf_folders.tensors(TOY, seed=2)))
    assert weights.read(folder).digest() != before


def _gpt2(config, tensors):
    config["architectures"] = ["GPT2LMHeadModel"]


def _nameless(config, tensors):
    del config["architectures"]


def _layers(config, tensors):
    config["num_hidden_layers"] = 3


def _vocabulary(config, tensors):
    config["vocab_size"] = 1024


def _rotary(config, tensors):
    config["rope_parameters"]["rope_theta"] = 10000.0


def _yarn(config, tensors):
    config["rope_parameters"] |= {"rope_type": "yarn", "factor": 4.0}


def _window(config, tensors):
    config |= {"use_sliding_window": True, "sliding_window": 16}


def _untied(config, tensors):
    config["tie_word_embeddings"] = False


def _other_head(config, tensors):
    dtype, shape, data = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = (dtype, shape, data[::-1])


def _missing_tensor(config, tensors):
    for number in range(2):
        del tensors[f"model.layers.{number}.mlp.up_proj.weight"]


def _more(config, tensors):
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"]


def _narrow(config, tensors):
    dtype, shape, data = tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = (dtype, shape[::-1], data)


def _quantised(config, tensors):
    _, shape, data = tensors["model.norm.weight"]
    tensors["model.norm.weight"] = ("F8_E4M3", shape, data)


def _no_size(config, tensors):
    config["num_attention_heads"] = 0


# What is wrong with config.json or the tensors, and what is said.
CHANGED = {
    _gpt2: 'its config.json is of ["GPT2LMHeadModel"]; tpi imports LlamaForCausalLM, Qwen2ForCausalLM, ',
    _nameless: "its config.json names no architecture; tpi imports LlamaForCausalLM",
    _layers: "its num_hidden_layers is 3; model.num_layers=3, not 2",
    _vocabulary: "its vocab_size is 1024; model.vocab_size=1024, not 512",
    _rotary: "its rope_theta is 10000.0; model.rotary_base=10000.0, not 1000000",
    _yarn: "Megatron-Core scales no rotary frequencies by",
    _window: "its config.json has use_sliding_window=true, and tpi imports no such model",
    _untied: "its tie_word_embeddings is false; model.share_embeddings_and_output_weights=false, not true",
    _other_head: "lm_head.weight and model.embed_tokens.weight differ, and its config.json ties them",
    _missing_tensor: "there is no tensor model.layers.0.mlp.up_proj.weight, model.layers.1.mlp.up_proj.weight",
    _more: "no place in the model for the tensor model.layers.2.mlp.up_proj.weight",
    _narrow: "the shape of model.layers.0.mlp.up_proj.weight [128, 256] instead of [256, 128]",
    _quantised: "model.norm.weight is F8_E4M3, and tpi takes BF16, F16, F32",
    _no_size: "its config.json is none of Qwen3ForCausalLM",
}


@pytest.mark.parametrize("change", CHANGED, ids=lambda change: change.__name__)
def test_other_weights_are_refused(tmp_path, change):
    assert CHANGED[change] in _problems(hf_folders.make(tmp_path / "a", TOY, change=change))


def test_a_tied_output_layer_may_be_stored_twice(tmp_path):
    def twice(config, tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    assert _problems(hf_folders.make(tmp_path / "a", TOY, change=twice)) == ""


def test_all_that_is_wrong_is_reported_at_once(tmp_path):
    def change(config, tensors):
        _layers(config, tensors)
        _vocabulary(config, tensors)

    message = _problems(hf_folders.make(tmp_path / "a", TOY, change=change))
    assert "model.num_layers=3" in message
    assert "model.vocab_size=1024" in message
    assert "there is no tensor model.layers.2.input_layernorm.weight" in message
    assert "model.embed_tokens.weight [512, 128] instead of [1024, 128]" in message


def test_another_architecture_is_refused_by_name(tmp_path):
    message = _problems(hf_folders.make(tmp_path / "a", TOY), hf_folders.model_section("llama32_toy"))
    assert "is of Qwen3ForCausalLM, and this model is a LlamaForCausalLM; choose another model" in message


def test_a_hybrid_model_is_refused_by_name(tmp_path):
    message = _problems(hf_folders.make(tmp_path / "a", TOY), {"hybrid_layer_pattern": "MEM*EME"})
    assert "a hybrid model has no weights that tpi imports or exports" in message


def _truncated(folder):
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-2])


def _longer(folder):
    with (folder / "model-00002-of-00002.safetensors").open("ab") as stream:
        stream.write(b"x")


def _empty(folder):
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"")


def _no_header(folder):
    (folder / "model-00002-of-00002.safetensors").write_bytes((2).to_bytes(8, "little") + b"{]")


def _long_header(folder):
    (folder / "model-00002-of-00002.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}")


def _overlap(folder):
    entry = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}
    text = json.dumps({"a": entry, "b": entry}).encode()
    (folder / "model-00002-of-00002.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"1234")


def _no_shape(folder):
    text = json.dumps({"a": {"dtype": "BF16", "shape": [True, -1], "data_offsets": [0, 4]}}).encode()
    (folder / "model-00002-of-00002.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"1234")


def _no_file(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()


def _elsewhere(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "../model.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _swapped(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    del index["weight_map"]["model.embed_tokens.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _no_index(folder):
    (folder / "model.safetensors.index.json").write_text("[]")


def _doubled(folder):
    (folder / "model.safetensors.index.json").unlink()
    (folder / "again.safetensors").write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())


def _no_config(folder):
    (folder / "config.json").unlink()


def _no_json(folder):
    (folder / "config.json").write_text("{")


def _no_weights(folder):
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").touch()


# What is damaged, and what is said.
DAMAGED = {
    _truncated: "model-00002-of-00002.safetensors: it has ",
    _longer: "model-00002-of-00002.safetensors: it has ",
    _empty: "model-00002-of-00002.safetensors: it is truncated or no safetensors file",
    _no_header: "model-00002-of-00002.safetensors: ",
    _long_header: "model-00002-of-00002.safetensors: it is truncated or no safetensors file",
    _overlap: "model-00002-of-00002.safetensors: the place of b does not fit its shape [2]",
    _no_shape: "model-00002-of-00002.safetensors: its header does not describe a",
    _no_file: "model.safetensors.index.json names model-00002-of-00002.safetensors, and there is no such file",
    _elsewhere: "model.safetensors.index.json: it names '../model.safetensors', which is no file of this folder",
    _swapped: "model.safetensors.index.json and the files disagree on where model.embed_tokens.weight, model.norm.we",
    _no_index: "model.safetensors.index.json: its weight_map does not say which file has which tensor",
    _doubled: "model.embed_tokens.weight is in again.safetensors and in model-00001-of-00002.safetensors",
    _no_config: "there is no config.json, which says what model it is",
    _no_json: "config.json cannot be read",
    _no_weights: "there are no *.safetensors; convert pytorch_model*.bin",
}


@pytest.mark.parametrize("damage", DAMAGED, ids=lambda damage: damage.__name__)
def test_a_damaged_folder_is_refused(tmp_path, damage):
    folder = hf_folders.make(tmp_path / "a", TOY, files=2)
    assert _problems(folder) == ""
    damage(folder)
    assert f"weights={folder}: {DAMAGED[damage]}" in _problems(folder)


def test_no_folder_and_a_file_are_refused(tmp_path):
    (tmp_path / "file").touch()
    assert _problems(tmp_path / "none") == f"weights={tmp_path / 'none'}: no such folder"
    assert "that is a file; name its folder" in _problems(tmp_path / "file")


# Overrides beside weights=, and what is said.
CONTRADICTIONS = {
    "checkpoint.pretrained_checkpoint=b": "checkpoint.pretrained_checkpoint both say where weights come from",
    "numerics=stock numerics.initial_weights=invariant": "numerics.initial_weights=invariant: weights=a has them",
    "numerics=stock ddp.use_megatron_fsdp=true": "ddp.use_megatron_fsdp=false; weights are imported before",
}


@pytest.mark.parametrize("overrides", CONTRADICTIONS)
def test_what_contradicts_weights_is_refused(overrides):
    with pytest.raises(ConfigError) as caught:
        compose("qwen3_toy", ["weights=a", *overrides.split()], device="cpu")
    assert CONTRADICTIONS[overrides] in str(caught.value)


def test_a_recipe_function_imports_no_weights():
    with pytest.raises(ConfigError, match="weights=a: `tpi train` imports them, and a ConfigContainer does not"):
        recipe("qwen3_toy", "weights=a")


def test_the_tokenizer_is_that_of_the_folder():
    assert compose("qwen3_toy", ["data=text", "data.path=x", "weights=a"]).config.data.tokenizer == "a"
    assert compose("qwen3_toy", ["data=text", "data.path=x"]).config.data.tokenizer == "byte"
    asked = ["data=text", "data.path=x", "weights=a", "data.tokenizer=b"]
    assert compose("qwen3_toy", asked).config.data.tokenizer == "b"


def test_the_identity_has_weights_only_where_a_run_has_them():
    config = compose("qwen3_toy", ["weights=a"]).config
    assert identity(config, None, "0" * 64)["weights.digest"] == "0" * 64
    assert identity(config, None) == identity(compose("qwen3_toy").config, None)


def test_a_models_config_round_trips(tmp_path):
    """Sizes go to config.json and come back; so do scaled rotary frequencies."""
    model = hf_folders.model_section("llama32_toy")
    family = hf_models.family_of(model)
    (tmp_path / "config.json").write_text(json.dumps(hf_models.config_of(family, model, "bfloat16")))
    assert hf_models._sizes(family, hf_models._config(tmp_path)) == family.sizes(model)
    assert family.sizes(model)["rope_factor"] == 32.0


@pytest.mark.parametrize(
    "model, field, value",
    (
        ("qwen3_toy", "no_rope_freq", [0, 1]),
        ("qwen3_toy", "softmax_scale", 0.5),
        ("qwen3_moe_toy", "moe_latent_size", 32),
        ("qwen3_moe_toy", "moe_router_topk_scaling_factor", 2.5),
        ("qwen3_moe_toy", "moe_router_group_topk", 1),
        ("gpt_oss_toy", "no_rope_freq", [1, 0]),
        ("olmoe_toy", "activation_func_clamp_value", 7.0),
    ),
)
def test_a_model_with_what_no_config_json_says_has_no_architecture(model, field, value):
    """transformers would compute another model from the same weights."""
    like = hf_folders.model_section(model)
    assert not isinstance(hf_models.family_of(like), str)
    result = hf_models.family_of({**like, field: value})
    assert isinstance(result, str)
    assert f"no architecture that tpi imports or exports has model.{field}={value};" in result


def test_a_folder_of_another_architecture_names_no_model(tmp_path):
    folder = hf_folders.make(tmp_path / "a", TOY, change=lambda config, _: config.update(architectures=["Other"]))
    with pytest.raises(ConfigError, match=r"its config.json is of .*Other.*; tpi imports LlamaForCausalLM, "):
        hf_models.model_of(weights.read(folder))


def test_large_exports_have_several_files_and_an_index(tmp_path, monkeypatch):
    from tp_invariant_recipes.features.export import rank as export

    monkeypatch.setattr(export, "SHARD", 100)
    (tmp_path / "config.json").write_text("{}")
    tensors = {name: torch.arange(size, dtype=torch.float32) for name, size in (("a", 10), ("b", 20), ("c", 10))}
    export.write(tmp_path, iter(tensors.items()), {*tensors})
    names = [f"model-{n}-of-00003.safetensors" for n in ("00001", "00002", "00003")]
    assert sorted(file.name for file in tmp_path.glob("*.safetensors")) == names
    results = weights.read(tmp_path).tensors
    assert {name: (result.file.name, result.shape) for name, result in results.items()} == {
        "a": (names[0], (10,)), "b": (names[1], (20,)), "c": (names[2], (10,))
    }  # fmt: skip


def test_an_export_of_other_tensors_is_a_defect(tmp_path):
    from tp_invariant_recipes.features.export import rank as export

    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RunError, match="wrote other tensors than the architecture has: b"):
        export.write(tmp_path, iter([("a", torch.zeros(1))]), {"a", "b"})


def test_a_folder_is_written_whole_or_not_at_all(tmp_path):
    def fail(folder):
        (folder / "file").touch()
        raise RunError

    with pytest.raises(RunError), whole_folder(tmp_path / "a") as folder:
        fail(folder)
    assert list(tmp_path.iterdir()) == []
    with whole_folder(tmp_path / "a") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a" / "file").read_text() == "x"
    with pytest.raises(OSError), whole_folder(tmp_path / "a"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_every_family_names_bridges_package():
    assert {family.model_type for family in hf_models.FAMILIES} == auto_bridge.PACKAGES.keys()
