# SPDX-License-Identifier: Apache-2.0
"""Composing a run: what ends up in the tree, which layer wins, and every mistake in one message."""

import re
import shutil
from pathlib import Path

import hydra
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models import sparing
from tp_invariant_recipes.config import hydra_tree
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.fingerprint import fingerprint
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.settings import conf_files
from tp_invariant_recipes.settings.keys import SHORT_KEYS
from tp_invariant_recipes.settings.sections import OWN_SECTIONS

MODELS = conf_files.groups()["model"]
MISSING = object()


def at(tree: dict, path: str):
    for name in path.split("."):
        tree = tree.get(name, MISSING)
    return tree


def listed_problems(*overrides: str, model: str = "qwen3_toy", device: str = "cpu") -> list[str]:
    """What is wrong, one entry a problem."""
    with pytest.raises(ConfigError) as error:
        compose(model, overrides, device=device)
    first, *rest = str(error.value).splitlines()
    if not rest:
        return [first]
    assert first == f"{len(rest)} problems in this configuration:"
    assert all(line.startswith("  - ") for line in rest)
    return [line.removeprefix("  - ") for line in rest]


# Short key, what is typed, the path it stands for and the value there. `with_` is what the value needs beside it.
TYPED = (
    ("tp", "2", "model.tensor_model_parallel_size", 2, ()),
    ("pp", "2", "model.pipeline_model_parallel_size", 2, ()),
    ("dp", "2", "parallel.data_parallel_size", 2, ("gbs=4",)),
    ("cp", "2", "model.context_parallel_size", 2, ("device=gpu", "numerics=stock")),
    ("ep", "2", "model.expert_model_parallel_size", 2, ("dp=2", "gbs=4")),
    ("etp", "2", "model.expert_tensor_parallel_size", 2, ("tp=2", "numerics=stock")),
    ("sp", "false", "model.sequence_parallel", False, ("tp=2", "numerics=stock")),
    ("seq", "64", "model.seq_length", 64, ()),
    ("mbs", "2", "train.micro_batch_size", 2, ("gbs=4",)),
    ("gbs", "8", "train.global_batch_size", 8, ()),
    ("iters", "7", "train.train_iters", 7, ()),
    ("lr", "0.5", "optimizer.lr", 0.5, ()),
    ("seed", "4321", "rng.seed", 4321, ()),
    ("save", "5", "checkpoint.save_interval", 5, ()),
    ("project", "ours", "logging.project", "ours", ("logging=wandb",)),
    ("name", "'a b'", "logging.name", "a b", ("logging=mlflow",)),
    ("weights", "models/a=b", "weights.folder", "models/a=b", ()),
)


def test_every_short_key_is_tried():
    assert [key for key, *_ in TYPED] == list(SHORT_KEYS)


@pytest.mark.parametrize("key, typed, path, value, with_", TYPED, ids=[key for key, *_ in TYPED])
def test_a_short_key_sets_the_field_it_stands_for(key, typed, path, value, with_):
    model = "qwen3_toy" if key == "sp" else "qwen3_moe_toy"  # stock's experts need sp=true
    assert at(compose(model, with_).config.sections, path) not in (MISSING, value)
    for name in (key, path):
        assert at(compose(model, [f"{name}={typed}", *with_]).config.sections, path) == value


@pytest.mark.parametrize("override", ("+tp=2", "++tp=2", "++model.tensor_model_parallel_size=2"))
def test_hydras_plus_signs_change_nothing(override):
    assert compose("qwen3_toy", [override]).config.sections == compose("qwen3_toy", ["tp=2"]).config.sections


def test_spelling_does_not_distinguish_runs():
    a, b = (fingerprint(compose("qwen3_toy", [o]).config, None) for o in ("optimizer.lr=1", "lr=1.0"))
    assert a == b
    assert repr(a) == repr(b)


def test_compositions_do_not_touch_each_other():
    changed = compose("qwen3_toy").config.sections
    changed["model"]["num_layers"] = 99
    assert compose("qwen3_toy").config.model["num_layers"] == 2


FP8 = {"fp8_tensorwise": "tensorwise", "fp8_blockwise": "blockwise", "mxfp8": "mxfp8"}
PRECISIONS = {"bf16": "bf16_mixed", "fp32": None, **FP8}
GRAPHS = {"auto": "full_iteration", "off": "none", "te": "transformer_engine", "full": "full_iteration"}
NEEDS = {
    "data=text": ["data.path=x"],
    "peft=lora": ["checkpoint.pretrained_checkpoint=x"],
    "guard=shadow": ["dp=2", "gbs=2"],
    **{f"cuda_graph={option}": ["device=gpu", "numerics=stock"] for option in GRAPHS},
    **{f"precision={option}": ["device=gpu", "numerics=stock"] for option in PRECISIONS},
}
OPTIONS = {group: options for group, options in conf_files.groups().items() if group != "model"}
# One option of each of these groups in a composition: the others' options need another device or numerics.
BESIDE = ("cluster", "data", "launcher", "logging")
OPTION_SETS = [
    [f"{group}={OPTIONS[group][n % len(OPTIONS[group])]}" for group in BESIDE]
    for n in range(max(len(OPTIONS[group]) for group in BESIDE))
]
ALONE = [[f"{group}={option}"] for group in OPTIONS.keys() - {*BESIDE} for option in OPTIONS[group]]


@pytest.mark.parametrize("chosen", sorted([*OPTION_SETS, *ALONE]), ids=" ".join)
def test_every_option_of_every_group_can_be_chosen_and_says_so(chosen):
    needs = [more for option in chosen for more in NEEDS.get(option, [])]
    tree = compose("qwen3_toy", [*chosen, *needs]).config.sections
    for group, option in (option.split("=") for option in chosen):
        if group == "precision":
            result = tree["mixed_precision"]
            assert (result["fp8_recipe"] if isinstance(result, dict) else result) == PRECISIONS[option]
        elif group == "cuda_graph":
            assert tree["model"]["cuda_graph_impl"] == GRAPHS[option]
        elif group == "peft":
            assert ("peft" in tree) == (option == "lora")
        else:
            assert tree[group][{"numerics": "mode", "cluster": "name"}.get(group, "kind")] == option


@pytest.mark.parametrize("model", sparing(MODELS))
@pytest.mark.parametrize("device", ("cpu", pytest.param("gpu", marks=pytest.mark.release)))  # `tpi models` composes all
def test_every_model_composes_for_both_devices(model, device):
    tree = compose(model, device=device).config.sections
    assert tree["device"]["kind"] == device
    assert set(OWN_SECTIONS) - {"recipe"} == set(OWN_SECTIONS) & set(tree)  # a section of recipes alone
    assert tree["tokenizer"]["vocab_size"] == tree["model"]["vocab_size"]
    weight = tree["optimizer"]["weight_decay"]
    assert tree["scheduler"]["start_weight_decay"] == tree["scheduler"]["end_weight_decay"] == weight


# Of these a CPU's vectors divide fewer shards than a GPU's default: 10944 = 2 * 32 * 171 and 2880 = 2 * 32 * 45.
@pytest.mark.parametrize("model", ("glm45_air", "gpt_oss_20b", "gpt_oss_120b"))
def test_these_models_have_fewer_shards_on_a_cpu(model):
    assert compose(model, device="gpu").config.numerics.virtual_shards == 8
    assert compose(model, device="cpu").config.numerics.virtual_shards == 2
    with pytest.raises(ConfigError, match="on a CPU it must be a multiple of 256"):
        compose(model, ["numerics.virtual_shards=8"], device="cpu")


@pytest.fixture
def own_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of conf/ that a test may change."""
    folder = tmp_path / "conf"
    shutil.copytree(conf_files.conf_dir(), folder)
    monkeypatch.setattr(conf_files, "conf_dir", lambda: folder)
    return folder


def test_a_model_is_a_file_and_numerics_precision_and_device_win_over_it(own_conf):
    (own_conf / "model" / "mine.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n  - qwen3_toy\n"
        "model:\n  num_layers: 3\n  deterministic_mode: false\n  transformer_impl: mine\n"
        "mixed_precision: mine\n"
    )
    assert "mine" in conf_files.groups()["model"]
    tree = compose("mine", device="cpu").config.sections
    assert tree["model"]["num_layers"] == 3
    assert tree["model"]["hidden_size"] == 128
    assert tree["model"]["deterministic_mode"] is True
    assert tree["model"]["transformer_impl"] == "local"
    assert tree["mixed_precision"] == "bf16_mixed"


def test_a_broken_file_is_a_message_beside_the_others(own_conf):
    (own_conf / "model" / "broken.yaml").write_text("# @package _global_\ndefaults:\n  - no_such_model\n")
    wrong, broken = listed_problems("tpp=2", model="broken")
    assert "did you mean 'tp'?" in wrong
    assert "no_such_model" in broken


# A command, the device that is detected, and a field that follows: later of config.yaml, the model's file, numerics,
# precision, device and the command line win over earlier ones, and of repeated keys the last.
FOLLOWS = (
    ("qwen3_toy tp=1", "cpu", "model.sequence_parallel", False),
    ("qwen3_toy tp=2", "cpu", "model.sequence_parallel", True),
    ("qwen3_toy tp=3 tp=4 tp=2", "cpu", "model.tensor_model_parallel_size", 2),
    ("qwen3_toy seq=64", "cpu", "dataset.seq_length", 64), ("qwen3_toy seed=7", "cpu", "dataset.random_seed", 7),
    ("qwen3_toy", "cpu", "ddp.use_distributed_optimizer", False),
    ("qwen3_toy", "cpu", "dist.distributed_backend", "gloo"),
    ("qwen3_toy", "gpu", "ddp.use_distributed_optimizer", True),
    ("qwen3_toy", "gpu", "dist.distributed_backend", "nccl"),
    ("qwen3_toy device=cpu", "gpu", "device.kind", "cpu"),
    ("qwen3_toy device=gpu", "cpu", "model.transformer_impl", "transformer_engine"),
    ("qwen3_8b", "cpu", "optimizer.lr", 3e-4), ("qwen3_toy", "cpu", "optimizer.lr", 3e-3),
    ("qwen3_toy lr=0.1", "cpu", "optimizer.lr", 0.1), ("qwen3_toy run.dir=null", "cpu", "run.dir", None),
    ("qwen3_toy run.dir='b'", "cpu", "run.dir", "b"),
)  # fmt: skip


@pytest.mark.parametrize("command, device, path, value", FOLLOWS)
def test_fields_that_follow_others(command, device, path, value):
    model, *overrides = command.split()
    assert at(compose(model, overrides, device=device).config.sections, path) == value


# Hydra's grammar would refuse, split or reckon with each of these.
TEXTS = (
    "lr=1e-3", "run#1", "é", "本文", "2024_01_15", "a,b", "30", "true", "[a]", "{a: b}", "x:y", "~", "a b", "'", '"x',
    "~/books", "/a=b/c", "/a (b)/c", "/x/[1]{2}", "it's", 'say "hi"', "C:\\x", "#1", "ünï/文",
)  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_a_field_of_text_has_the_text_as_typed(text):
    """Ours by a short key and by its path, paths, a variable of the ranks, Bridge's with and without null."""
    keys = ("name", "run.dir", "data.path", "data.cache", "data.tokenizer", "data.json_key", "slurm.account")
    keys += ("cluster.environment.A", "tokenizer.vocab_file", "dataset.split")
    typed = compose("qwen3_toy", [*(f"{key}={text}" for key in keys), "logging=mlflow", "data=text"])
    assert [at(typed.config.sections, path) for path in ("logging.name", *keys[1:])] == [text] * len(keys)


# One mistake each: overrides, and what the one line about it must say. The first word is the key to change.
MISTAKES = (
    (["tp=x"], "tp=x: tensor-parallel degree: expected int, such as 4"),
    (["tp=null"], "tp=null: tensor-parallel degree: expected int, such as 4"),
    (["tp=1,2"], "tp=1,2: one run takes one value for tp"),
    (["lr=fast"], "lr=fast: peak learning rate: expected float, such as 1e-4"),
    (["sp=maybe"], "sp=maybe: sequence parallelism (default: on when tp > 1): expected bool, such as true"),
    (["tpp=2"], "tpp=2: unknown key 'tpp'; did you mean 'tp'?"),
    (["hydra.run.dir=x"], "hydra.run.dir=x: unknown key 'hydra.run.dir'"),
    (["data=texxt"], "data=texxt: unknown data 'texxt'; did you mean 'text'?"),
    (["numerics=magic"], "numerics=magic: unknown numerics 'magic'; there are: "),
    (["cluster=null"], "cluster=null: unknown cluster 'null'; there are: b300, gb300, gh200, h100, h200, local"),
    (["model=qwen3_8b"], "model=qwen3_8b: the model is the first argument: tpi train qwen3_8b …"),
    (["train=3"], "train=3: 'train' is a section; set one of its fields, as in train.FIELD=VALUE"),
    (["tp"], "'tp' is not KEY=VALUE"),
    (["--tp=2"], "'--tp=2' is not KEY=VALUE"),
    (["~tp"], "~tp: fields cannot be deleted"),
    (["run.dri=x"], "run.dri: no such field of RunSettings; did you mean 'run.dir'?"),
    (["numerics.mode=magic"], "numerics.mode=magic: expected one of 'stock'"),
    (["ledger.state_digests=x", "ledger.digests=0"], "ledger.state_digests=x: expected int, such as 4"),
    (["tp=3", "seq=126"], "tp=3 does not divide model.num_attention_heads=8"),
)


@pytest.mark.parametrize("overrides, says", MISTAKES, ids=[" ".join(o) for o, _ in MISTAKES])
def test_a_mistake_is_one_line_that_names_the_key(overrides, says):
    (problem,) = listed_problems(*overrides)
    assert problem.startswith(says)


def test_an_unknown_model_is_named_with_the_nearest():
    assert listed_problems(model="qwen3_8") == ["unknown model 'qwen3_8'; did you mean 'qwen3_8b'?"]
    assert listed_problems(model="gpt") == ["unknown model 'gpt'; tpi models lists all"]


def test_a_folder_in_the_models_place_is_called_what_it_is(tmp_path):
    (unknown,) = listed_problems(model=str(tmp_path))
    assert unknown.startswith("unknown model '")
    (tmp_path / "config.json").touch()
    (weights,) = listed_problems(model=str(tmp_path))
    assert f"a folder of weights, not a model: type weights={tmp_path}" in weights
    (tmp_path / "run.json").touch()
    (run,) = listed_problems(model=str(tmp_path))
    assert all(words in run for words in ("is a run, not a model", f"tpi report {tmp_path}", f"--resume {tmp_path}"))


def test_all_mistakes_are_reported_at_once():
    typed = "tpp=2 lr=fast numerics=magic tp=1,2 run.dri=x pp=3 gbs=3 mbs=2 data=text ~sp"
    problems = listed_problems(*typed.split())
    for key in ("tpp=2", "lr=fast", "numerics=magic", "tp=1,2", "~sp", "run.dri", "pp=3", "gbs=3", "data=text"):
        assert sum(re.split(r": | (?:does|is|needs) ", problem)[0] == key for problem in problems) == 1, key
    assert len(problems) == 9


def test_with_an_unknown_model_the_keys_are_checked_all_the_same():
    assert [p.split(":")[0] for p in listed_problems("tp=x", "devise=cpu", model="gpt2")[1:]] == ["tp=x", "devise=cpu"]


def test_the_message_does_not_say_a_mistake_twice():
    assert len(listed_problems("lr=fast", "optimizer.lr=fast")) == 2
    assert len(listed_problems("tp=0")) == 1


@given(
    st.one_of(
        st.text(), st.builds("{}={}".format, st.sampled_from([*SHORT_KEYS, "run.dir", "data", "model"]), st.text())
    )
)
def test_whatever_is_typed_is_at_worst_a_configuration_error(text):
    with pytest.raises(ConfigError, match="unknown model 'none'"):
        compose("none", [text])


def test_a_program_that_hydra_runs_may_compose_and_keeps_its_own(tmp_path):
    (tmp_path / "config.yaml").write_text("own: 1\n")
    hydra_tree._merged.cache_clear()
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert compose("qwen3_toy", ["tp=2"], device="cpu").config.layout.tp == 2
        assert hydra.compose("config") == {"own": 1}


FUSED = ("model.cross_entropy_loss_fusion", "model.gradient_accumulation_fusion")
OVERLAPPED = ("ddp.overlap_grad_reduce", "ddp.overlap_param_gather", "optimizer.overlap_param_gather")


@pytest.mark.parametrize(
    "words, device, fused, overlapped, deterministic",
    (
        ("numerics=stock dp=2 gbs=2", "gpu", True, True, None),
        ("numerics=stock", "gpu", True, False, None),
        ("numerics=stock dp=2 gbs=2 optimizer.use_distributed_optimizer=false", "gpu", True, False, None),
        ("numerics=stock dp=2 gbs=2", "cpu", False, False, None),
        ("numerics=deterministic dp=2 gbs=2", "gpu", False, False, True),
        ("numerics=tree dp=2 gbs=2", "gpu", False, True, True),
        ("numerics=portable dp=2 gbs=2", "gpu", False, False, True),
        ("numerics=tree dp=2 gbs=2 guard=shadow", "gpu", False, False, True),
        ("numerics=tree dp=2 gbs=2 numerics.data_shards=2 ddp.use_megatron_fsdp=true "
         "ddp.data_parallel_sharding_strategy=optim", "gpu", False, False, True),
        ("numerics=tree dp=2 gbs=2", "cpu", False, False, True),
    ),
)  # fmt: skip
def test_what_bridges_recipes_have_for_speed_is_on_by_default(words, device, fused, overlapped, deterministic):
    config = compose("qwen3_toy", words.split(), device=device).config
    assert [config.at(path) for path in FUSED] == [fused] * 2
    assert [config.at(path) for path in OVERLAPPED] == [overlapped] * 3
    assert config.model.get("deterministic_mode") is deterministic
