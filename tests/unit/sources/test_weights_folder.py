# SPDX-License-Identifier: Apache-2.0
"""`weights=FOLDER`: what is read of a folder, its digest, and every folder that is refused, with the key to change."""

import json
import os
import shutil

import pytest
import torch

from tests import hf_folders
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.fingerprint import fingerprint
from tp_invariant_recipes.errors import ConfigError, RunError
from tp_invariant_recipes.files import whole_folder
from tp_invariant_recipes.sources import hf_models, weights

TOY = hf_folders.model_section("qwen3_toy")


def _problems(folder, model=TOY):
    try:
        return "\n".join(hf_models.problems(model, weights.read(folder)))
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("name", ("qwen3_toy", "llama32_toy", "qwen25_toy", "qwen3_moe_toy"))
def test_weights_of_the_model_itself_fit(tmp_path, name):
    experts = ("model.moe_ffn_hidden_size=32", "model.num_moe_experts=8", "model.vocab_size=512")
    model = hf_folders.model_section(
        name, "model.hidden_size=64", "model.num_layers=2", *(experts if name == "qwen3_moe_toy" else ())
    )
    assert _problems(hf_folders.make(tmp_path / "a", model), model) == ""


def test_the_digest_is_of_tensors_and_not_of_files(tmp_path):
    single = hf_folders.make(tmp_path / "one", TOY)
    three = hf_folders.make(tmp_path / "three", TOY, files=3)
    assert weights.read(single).digest() == weights.read(three).digest()
    assert weights.read(single).digest() != weights.read(hf_folders.make(tmp_path / "other", TOY, seed=1)).digest()


def test_a_file_that_is_rewritten_is_reread(tmp_path):
    folder = hf_folders.make(tmp_path / "a", TOY)
    before = weights.read(folder).digest()
    (folder / "model.safetensors").write_bytes(hf_folders.file(hf_folders.tensors(TOY, seed=2)))
    assert weights.read(folder).digest() != before


NORM, UP, EMBEDDING = "model.norm.weight", "model.layers.{}.mlp.up_proj.weight", "model.embed_tokens.weight"


def _as(tensors, name, dtype=None, *, to=None, shape=None, data=None):
    """Change a tensor, or add a changed copy of it under the name `to`."""
    old = tensors[name]
    tensors[to or name] = (dtype or old[0], shape or old[1], data or old[2])


def _missing(config, tensors):
    for number in range(2):
        del tensors[UP.format(number)]


DIFFERENT = {
    "name": lambda _, tensors: tensors.update({"model.norm.bias": tensors.pop(NORM)}),
    "bits": lambda _, tensors: _as(tensors, NORM, data=bytes([tensors[NORM][2][0] ^ 1]) + tensors[NORM][2][1:]),
    "shape": lambda _, tensors: _as(tensors, NORM, shape=(1, *tensors[NORM][1])),
    "type": lambda _, tensors: _as(tensors, NORM, "F16"),
}


@pytest.mark.parametrize("change", DIFFERENT)
def test_the_digest_has_names_types_shapes_and_bits(tmp_path, change):
    before = weights.read(hf_folders.make(tmp_path / "before", TOY)).digest()
    assert weights.read(hf_folders.make(tmp_path / "after", TOY, change=DIFFERENT[change])).digest() != before


# What is said, and what is wrong with config.json or the tensors.
CHANGED = {
    'its config.json is of ["GPT2LMHeadModel"]; tpi imports LlamaForCausalLM, Qwen2ForCausalLM, ': lambda config, _: (
        config.update(architectures=["GPT2LMHeadModel"])
    ),
    "its config.json names no architecture; tpi imports LlamaForCausalLM": lambda config, _: config.pop(
        "architectures"
    ),
    "its num_hidden_layers is 3; model.num_layers=3, not 2": lambda config, _: config.update(num_hidden_layers=3),
    "its vocab_size is 1024; model.vocab_size=1024, not 512": lambda config, _: config.update(vocab_size=1024),
    "its rope_theta is 10000.0; model.rotary_base=10000.0, not 1000000": lambda config, _: config[
        "rope_parameters"
    ].update(rope_theta=10000.0),
    "Megatron-Core scales no rotary frequencies by": lambda config, _: config["rope_parameters"].update(
        rope_type="yarn", factor=4.0
    ),
    "its config.json has use_sliding_window=true, and tpi imports no such model": lambda config, _: config.update(
        use_sliding_window=True, sliding_window=16
    ),
    'its config.json has layer_types other than ["full_attention", "full_attention"]': lambda config, _: config.update(
        layer_types=["sliding_attention", "full_attention"]
    ),
    "scales no rotary frequencies by {'rope_theta': 1000000": lambda config, _: config["rope_parameters"].update(
        partial_rotary_factor=0.5
    ),
    "its config.json has attention_bias=true, and tpi imports no such model": lambda config, _: config.update(
        attention_bias=True
    ),
    "its tie_word_embeddings is false; model.share_embeddings_and_output_weights=false, not true": lambda config, _: (
        config.update(tie_word_embeddings=False)
    ),
    "lm_head.weight and model.embed_tokens.weight differ, and its config.json ties them": lambda _, tensors: _as(
        tensors, EMBEDDING, to="lm_head.weight", data=tensors[EMBEDDING][2][::-1]
    ),
    "there is no tensor model.layers.0.mlp.up_proj.weight, model.layers.1.mlp.up_proj.weight": _missing,
    "the model has no parameter for the tensor model.layers.2.mlp.up_proj.weight": lambda _, tensors: _as(
        tensors, UP.format(1), to=UP.format(2)
    ),
    "the shape of model.layers.0.mlp.up_proj.weight [128, 256] instead of [256, 128]": lambda _, tensors: _as(
        tensors, UP.format(0), shape=(128, 256)
    ),
    "model.norm.weight is F8_E4M3, and tpi takes BF16, F16, F32": lambda _, tensors: _as(
        tensors, NORM, "F8_E4M3", data=tensors[NORM][2][::2]
    ),
    "its config.json is none of Qwen3ForCausalLM": lambda config, _: config.update(num_attention_heads=0),
}


@pytest.mark.parametrize("says", CHANGED)
def test_other_weights_are_refused(tmp_path, says):
    assert says in _problems(hf_folders.make(tmp_path / "a", TOY, change=CHANGED[says]))


@pytest.mark.parametrize(
    "model, field, value",
    (
        ("gemma3_1b", "use_bidirectional_attention", True),
        ("qwen25_toy", "layer_types", ["full_attention", "sliding_attention"]),
        ("qwen3_moe_toy", "hidden_act", "gelu"), ("glm45_toy", "partial_rotary_factor", 0.25),
        ("olmoe_toy", "clip_qkv", 8.0), ("llama32_toy", "mlp_bias", True),
        ("gpt_oss_toy", "layer_types", ["full_attention"] * 2),
        ("qwen3_next_toy model.mtp_num_layers=null", "hidden_act", "gelu"),
    ),
)  # fmt: skip
def test_a_field_that_changes_what_is_computed_is_refused_by_name(tmp_path, model, field, value):
    """Also one that no row names: every field that transformers' class reads has its default or is known."""
    section = hf_folders.model_section(*model.split())
    family = hf_models.family_of(section)
    config = hf_models.config_of(family, section, "bfloat16")

    def wrong(name: str, config: dict) -> list[str]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "model.safetensors").write_bytes(hf_folders.file({}))
        return [line for line in hf_models.problems(section, weights.read(tmp_path / name)) if "tensor" not in line]

    assert wrong("a", config) == []  # the control
    assert any(field in line for line in wrong("b", config | {field: value}))


def test_frequencies_that_llama_2_has_stored_are_no_weights(tmp_path):
    def older(config, tensors):
        for layer in range(2):
            tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = ("F32", (8,), bytes(32))

    assert _problems(hf_folders.make(tmp_path / "a", TOY, change=older)) == ""


def test_a_tied_output_layer_may_be_stored_twice(tmp_path):
    def twice(config, tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    assert _problems(hf_folders.make(tmp_path / "a", TOY, change=twice)) == ""


def test_a_model_may_leave_out_the_mtp_of_a_folder(tmp_path):
    """As scores and rollouts do. The control: a folder without MTP is none of a model that has it."""
    with_mtp, without = (hf_folders.model_section("glm45_toy", *more) for more in ((), ("model.mtp_num_layers=null",)))
    assert _problems(hf_folders.make(tmp_path / "a", with_mtp), without) == ""
    assert "model.mtp_num_layers=null, not 1" in _problems(hf_folders.make(tmp_path / "b", without), with_mtp)


def test_another_architecture_is_refused_by_name(tmp_path):
    message = _problems(hf_folders.make(tmp_path / "a", TOY), hf_folders.model_section("llama32_toy"))
    assert "is of Qwen3ForCausalLM, and this model is a LlamaForCausalLM; choose another model" in message


def test_a_hybrid_model_is_refused_by_name(tmp_path):
    message = _problems(hf_folders.make(tmp_path / "a", TOY), {"hybrid_layer_pattern": "MEM*EME"})
    assert "a hybrid model has no weights that tpi imports or exports" in message


INDEX, CONFIG, SECOND = "model.safetensors.index.json", "config.json", "model-00002-of-00002.safetensors"


def _header(**entries) -> bytes:
    """A file of safetensors with these entries and four bytes of values."""
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + b"1234"


def _indexed(folder, name: str, file: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][name] = file
    (folder / INDEX).write_text(json.dumps(index))


def _doubled(folder) -> None:
    (folder / INDEX).unlink()
    (folder / "again.safetensors").write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())


def _other_format(folder) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").touch()


ENTRY = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}
DAMAGE = f"{SECOND}: it is damaged, truncated or no safetensors file"
# What is damaged, and what is said.
DAMAGED = (
    (lambda folder: os.truncate(folder / SECOND, (folder / SECOND).stat().st_size - 2), DAMAGE),
    (lambda folder: (folder / SECOND).write_bytes((folder / SECOND).read_bytes() + b"x"), DAMAGE),
    (lambda folder: os.truncate(folder / SECOND, 0), f"{SECOND}: "),
    (lambda folder: (folder / SECOND).write_bytes((2).to_bytes(8, "little") + b"{]"), DAMAGE),
    (lambda folder: (folder / SECOND).write_bytes((2**60).to_bytes(8, "little") + b"{}"), DAMAGE),
    (lambda folder: (folder / SECOND).write_bytes(_header(a=ENTRY, b=ENTRY)), DAMAGE),
    (lambda folder: (folder / SECOND).write_bytes(_header(a=ENTRY | {"shape": [True, -1]})), DAMAGE),
    (lambda folder: (folder / SECOND).write_bytes(_header(a=ENTRY | {"data_offsets": [0, 2**62]})), DAMAGE),
    (lambda folder: (folder / SECOND).unlink(), f"{INDEX} names {SECOND}, and there is no such file"),
    (
        lambda folder: _indexed(folder, NORM, "../model.safetensors"),
        f"{INDEX}: it names '../model.safetensors', which is no file of this folder",
    ),
    (
        lambda folder: _indexed(folder, NORM, "model-00001-of-00002.safetensors"),
        f"{INDEX} and the files disagree on where {NORM}",
    ),
    (lambda folder: (folder / INDEX).write_text("[]"), f"{INDEX}: its weight_map does not say which file has which"),
    (_doubled, f"{EMBEDDING} is in again.safetensors and in model-00001-of-00002.safetensors"),
    (lambda folder: (folder / CONFIG).unlink(), "there is no config.json, which names the model"),
    (lambda folder: (folder / CONFIG).write_text("{"), "config.json cannot be read"),
    (_other_format, "there are no *.safetensors; convert pytorch_model*.bin"),
)


def test_a_damaged_folder_is_refused(tmp_path):
    sound = hf_folders.make(tmp_path / "sound", TOY, files=2)
    assert _problems(sound) == ""
    for number, (damage, says) in enumerate(DAMAGED):
        folder = shutil.copytree(sound, tmp_path / str(number))
        damage(folder)
        assert f"weights={folder}: {says}" in _problems(folder)


def test_no_folder_and_a_file_are_refused(tmp_path):
    (tmp_path / "file").touch()
    assert _problems(tmp_path / "none") == f"weights={tmp_path / 'none'}: no such folder"
    assert "that is a file; name its folder" in _problems(tmp_path / "file")


# Overrides beside weights=, and what is said.
CONTRADICTIONS = {
    "checkpoint.pretrained_checkpoint=b": "checkpoint.pretrained_checkpoint says where weights come from, too; leave",
    "numerics=stock numerics.initial_weights=invariant": "the folder has the weights; leave numerics.initial_weights",
    "numerics=stock ddp.use_megatron_fsdp=true": "weights are imported before they are sharded; ddp.use_megatron_fsdp",
}


@pytest.mark.parametrize("overrides", CONTRADICTIONS)
def test_what_contradicts_weights_is_refused(overrides):
    with pytest.raises(ConfigError) as caught:
        compose("qwen3_toy", ["weights=a", *overrides.split()], device="cpu")
    assert f"weights=a: {CONTRADICTIONS[overrides]}" in str(caught.value)


def test_the_tokenizer_is_that_of_the_folder():
    assert compose("qwen3_toy", ["data=text", "data.path=x", "weights=a"]).config.data.tokenizer == "a"
    assert compose("qwen3_toy", ["data=text", "data.path=x"]).config.data.tokenizer == "byte"
    asked = ["data=text", "data.path=x", "weights=a", "data.tokenizer=b"]
    assert compose("qwen3_toy", asked).config.data.tokenizer == "b"


def test_the_identity_has_weights_only_where_a_run_has_them():
    config = compose("qwen3_toy", ["weights=a"]).config
    assert fingerprint(config, None, "0" * 64)["weights.digest"] == "0" * 64
    assert fingerprint(config, None) == fingerprint(compose("qwen3_toy").config, None)


@pytest.mark.parametrize(
    "model, field, value",
    (
        ("qwen3_toy", "no_rope_freq", [0, 1]), ("qwen3_toy", "softmax_scale", 0.5),
        ("qwen3_moe_toy", "moe_latent_size", 32), ("qwen3_moe_toy", "moe_router_topk_scaling_factor", 2.5),
        ("qwen3_moe_toy", "moe_router_group_topk", 1), ("gpt_oss_toy", "no_rope_freq", [1, 0]),
        ("olmoe_toy", "activation_func_clamp_value", 7.0),
    ),
)  # fmt: skip
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
    export.write(tmp_path, iter(tensors.items()), {n: tuple(t.shape) for n, t in tensors.items()}, torch.float32)
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
        export.write(tmp_path, iter([("a", torch.zeros(1))]), {"a": (1,), "b": (1,)}, torch.float32)


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
