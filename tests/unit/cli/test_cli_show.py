# SPDX-License-Identifier: Apache-2.0
"""`tpi show`, `tpi models`, `tpi doctor`: for people on a terminal and, with --json, for machines."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tp_invariant_recipes.cli.checks import GPU_NEEDS, NEEDED
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.launch import plan, record
from tp_invariant_recipes.machine import gpus, versions
from tp_invariant_recipes.machine.gpus import Gpu
from tp_invariant_recipes.patches import registry
from tp_invariant_recipes.patches.patch import Patch, PatchVerdict
from tp_invariant_recipes.settings import conf_files

ROOT = Path(__file__).resolve().parents[3]
H200 = Gpu("NVIDIA H200", (9, 0), 139 * 2**30)


def test_show_is_the_tree_and_the_same_as_overrides(cli, no_gpus):
    ended = cli("show", "qwen3_8b", "tp=4", "seq=4096", "--all")
    assert (ended.status, ended.err) == (0, "")
    tree, overrides = ended.out.split("\n# Megatron-Bridge overrides\n")
    assert yaml.safe_load(tree) == compose("qwen3_8b", ["tp=4", "seq=4096"], device="cpu").config.sections
    assert "model.tensor_model_parallel_size=4" in overrides.splitlines()
    assert 'dataset.split="1,0,0"' in overrides.splitlines()


def test_show_is_brief(cli, no_gpus):
    ended = cli("show", "qwen3_8b", "tp=4", "device=gpu")
    assert (ended.status, ended.err) == (0, "")
    assert len(ended.out.splitlines()) == 5
    assert ended.out.startswith("tp=4 pp=1 dp=1 cp=1 ep=1 ")
    assert " device=gpu " in ended.out.splitlines()[1]
    assert "memory of the fullest rank, about: 4" in ended.out


def test_show_as_json(cli, no_gpus):
    ended = cli("show", "qwen3_8b", "tp=4", "--json")
    assert (ended.status, ended.err) == (0, "")
    shown = json.loads(ended.out)
    assert shown.keys() == {"configuration", "bridge_overrides", "memory"}
    assert shown["memory"].keys() == {"parts", "rank", "ranks_per_node", "node", "not_followed"}
    assert shown["memory"]["rank"] == sum(shown["memory"]["parts"].values())
    assert shown["memory"]["ranks_per_node"] == 4
    assert shown["configuration"] == compose("qwen3_8b", ["tp=4"], device="cpu").config.sections
    assert "optimizer.lr=0.0003" in shown["bridge_overrides"]
    assert "mixed_precision=bf16_mixed" in shown["bridge_overrides"]


def test_models(cli):
    ended = cli("models")
    assert ended.status == 0
    for model in conf_files.groups()["model"]:
        assert f"\n{model} " in f"\n{ended.out}"
    assert re.search(r"^qwen3_8b +8\.19 B  Qwen3-8B: 36 layers, untied embeddings\.$", ended.out, re.M)
    assert "0.4 M" in ended.out
    assert all(len(line) <= 80 for line in ended.out.splitlines())


def test_the_details_of_one_model(cli):
    ended = cli("models", "deepseek_v3")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith("deepseek_v3: DeepSeek-V3: 61 layers, 256 experts. 8 experts per token")
    assert "as the published one does.\n" in ended.out
    assert "tp=1 159, tp=2 81, tp=4 41, tp=8 22" in cli("models", "qwen3_8b").out
    assert json.loads(cli("models", "qwen3_8b", "--json").out)["layers"] == 36
    assert "did you mean 'qwen3_8b'?" in cli("models", "qwen3_8").err


def test_a_users_own_model_is_listed_beside_tpis(cli, tmp_path):
    mine = tmp_path / "config/tpi/model"
    mine.mkdir(parents=True)
    text = "# Mine: 3 layers.\n# Of my own.\ndefaults:\n  - qwen3_toy\nmodel:\n  num_layers: 3\n"
    (mine / "mine.yaml").write_text(f"# @package _global_\n{text}")
    assert re.search(r"\nmine +0\.\d M  Mine: 3 layers\.\n", cli("models").out)
    assert "mine: Mine: 3 layers. Of my own.\n" in cli("models", "mine").out


def test_models_as_json(cli):
    ended = cli("models", "--json")
    assert (ended.status, ended.err) == (0, "")
    rows = json.loads(ended.out)
    assert [row["model"] for row in rows] == list(conf_files.groups()["model"])
    types = dict(model=str, summary=str, parameters=int, layers=int, hidden_size=int, tp=list, cpu=bool)
    types["memory"] = list
    for row in rows:
        assert len(row["memory"]) == len(row["tp"])
        assert row["memory"] == sorted(row["memory"], reverse=True)
        assert {key: type(value) for key, value in row.items()} == types


@pytest.fixture
def machine_shown(monkeypatch):
    """Make this machine one with these GPUs and versions; with a patch of every kind."""

    class Stated(Patch):
        """One whose name ends with its state."""

        def verdict(self, off=False):
            return PatchVerdict(self.name.removeprefix("te-"), "package 1.9")

    link = "https://github.com/NVIDIA/TransformerEngine/issues/3051"
    patches = tuple(
        Stated(f"te-{state}", "<2", {"os.path:join": str}, "joins", upstream=link)
        for state in ("applies", "not needed", "refused")
    )

    def make(result=(), **missing):
        found = versions.pinned() | {name.replace("_", "-"): version for name, version in missing.items()}
        monkeypatch.setattr(registry, "PATCHES", patches)
        monkeypatch.setattr(gpus, "visible", lambda: list(result))
        monkeypatch.setattr(versions, "installed", found.get)

    return make


# GPUs, versions other than the pinned ones; exit status, and the states that are not ok.
MACHINES = (
    ([H200, H200], {}, 0, {}),
    (
        [], {"transformer_engine": None, "mamba_ssm": None}, 0,
        {"transformer-engine": "optional", "mamba-ssm": "optional"},
    ),
    ([H200], {"transformer_engine": None}, 2, {"transformer-engine": "missing"}),
    ([H200], {"torch": None, "emerging_optimizers": None}, 2, {"torch": "missing", "emerging-optimizers": "optional"}),
    ([H200], {"megatron_core": "0.20.0", "torch": "2.11.0+cu130"}, 0, {"megatron-core": "untested"}),
)  # fmt: skip


@pytest.mark.parametrize("visible, other, status, states", MACHINES)
def test_doctor_names_what_is_missing_here(cli, machine_shown, visible, other, status, states):
    machine_shown(visible, **other)
    ended = cli("doctor", "--json")
    rows = {row["what"]: row for row in json.loads(ended.out)}
    assert (ended.status, ended.err) == (status, "")
    states = states | {"patch te-refused": "refused"} | ({} if visible else {"GPUs": "optional"})
    assert {what: row["state"] for what, row in rows.items() if row["state"] != "ok"} == states
    assert all("make " in row["advice"] for row in rows.values() if row["state"] == "missing")
    if len(visible) == 2:
        assert rows["GPUs"]["found"] == "2 × NVIDIA H200 (sm_90, 139 GiB)"


def test_doctor_shows_the_patches_with_whole_links(cli, machine_shown, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    machine_shown([H200])
    link = "https://github.com/NVIDIA/TransformerEngine/issues/3051"
    told = f"needed by transformer-engine <2; without it: joins; {link}"
    assert f"patch te-refused: refused: package 1.9; {told}" in cli("doctor").out.splitlines()
    machine_shown(megatron_core=None)
    assert "patch" not in cli("doctor").out


def test_the_locks_have_what_doctor_asks_for():
    assert NEEDED.keys() <= versions.pinned().keys()


def test_the_docs_name_the_same_needs_and_models(models_table):
    text = " ".join((ROOT / "docs/install.md").read_text().replace("`", "").split())
    toys = [model for model in conf_files.groups()["model"] if model.endswith("_toy")]
    assert {*toys} <= {row["model"] for row in models_table if row["cpu"]}
    assert [word for word in (*toys, *GPU_NEEDS) if word not in text] == []


def test_show_the_keys_that_differ(cli, no_gpus):
    ended = cli("show", "--diff", "qwen3_toy", "qwen3_toy tp=2 seed=3")
    assert (ended.status, ended.err) == (1, "")
    lines = ended.out.splitlines()
    assert "  model.tensor_model_parallel_size: 1 -> 2" in lines
    assert "* rng.seed: 1234 -> 3" in lines
    assert lines[-1] == "* runs that differ there are not comparable"
    same = cli("show", "--diff", "qwen3_toy", "qwen3_toy tp=2", "tp=2")  # the override is for both
    assert (same.status, same.out) == (0, "no key differs\n")
    layouts = cli("show", "--diff", "qwen3_toy", "qwen3_toy tp=2", "--json")
    result = json.loads(layouts.out)["different"]
    assert {"key": "model.tensor_model_parallel_size", "a": 1, "b": 2, "comparable": True} in result
    assert "unknown model 'qwen3_toi'" in cli("show", "--diff", "qwen3_toy", "qwen3_toi").err
    assert cli("show", "--diff", "qwen3_toy", "'").status == 2


def test_show_the_configuration_of_a_run(cli, here, no_gpus):
    planned = plan.new(compose("qwen3_toy", ["tp=2", "run.dir=run"], device="cpu"))
    record.write(planned)
    shown = json.loads(cli("show", "--from", "run", "--json").out)["configuration"]
    assert shown["checkpoint"] == planned.config.section("checkpoint")
    assert "a rank" in cli("show", "--from", "run", "--all").out
    assert "numerics=tree" in cli("show", "--from", "run").out
    assert cli("show", "--from", "run", "tp=4").out.startswith("tp=4 ")
    changed = cli("show", "--diff", "run", "qwen3_toy tp=2 run.dir=run").out
    assert "checkpoint.save: run/checkpoints -> null" in changed
    assert "tensor_model" not in changed
    (here / "run" / "config.yaml").write_text("model: [2026-01-01]\n")
    forged = cli("show", "--from", "run")
    assert (forged.status, forged.out) == (2, "")
    assert "is not one of this version of tpi" in forged.err
    assert "Traceback" not in forged.err
    assert cli("show", "--from", "taken").status == 2


MODEL_NEEDED = "name one: a model (tpi models lists them), --from RUN, or --diff A B"
TWO = "--diff takes two: run directories, models, or a model with overrides in quotes"


@pytest.mark.parametrize(
    "words, message",
    (((), MODEL_NEEDED), (("qwen3_toy", "--from", "run"), MODEL_NEEDED), (("qwen3_toy", "--diff", "a", "b"), TWO)),
    ids=("nothing", "model and run", "three to compare"),
)
def test_show_takes_one_thing(cli, words, message):
    ended = cli("show", *words)
    assert (ended.status, ended.out) == (2, "")
    assert message in ended.err
