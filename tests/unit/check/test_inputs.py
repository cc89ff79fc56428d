# SPDX-License-Identifier: Apache-2.0
"""Files that a run names and that are not there stand in one list with the settings that are wrong."""

import json
from pathlib import Path

import numpy as np
import pytest

from tp_invariant_recipes.check.hosts.inputs import input_problems
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.data.text import prepare, read_index
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.launch import plan
from tp_invariant_recipes.launch.record import RunRequest
from tp_invariant_recipes.ledger.run_files import RunFile

# Overrides of `tpi train qwen3_toy`, and every problem of them.
WRONG = (
    (
        "data=text data.path=none data.tokenizer=none checkpoint.pretrained_checkpoint=none seq=63 tp=3",
        (
            "tp=3 does not divide",
            "checkpoint.pretrained_checkpoint=none: there is no such folder",
            "data.path=none: no file or folder of text",
            "data.tokenizer: tokenizer none: no such folder. Give data.tokenizer=byte or a local folder",
        ),
    ),
    (
        "weights=none data=text sp=true",
        ("sp=true needs tp > 1", "data=text needs data.path=FILE_OR_FOLDER", "none: no such folder"),
    ),
    (
        "weights=taken data=text data.path=taken/a.txt",
        ("there are no *.safetensors", "data.tokenizer=byte or a local folder with a Hugging Face tokenizer"),
    ),
    ("data=text data.path=none data.tokenizer=byte", ("data.path=none: no file or folder of text",)),
)


@pytest.mark.parametrize("command", ("train", "verify"))
@pytest.mark.parametrize("overrides, says", WRONG)
def test_settings_and_files_that_are_wrong_come_in_one_list(cli, here, no_gpus, command, overrides, says):
    (here / "taken" / "a.txt").write_text("text")
    several = {"train": [], "verify": ["mbs=1,2", "gbs=2"]}[command]
    ended = cli(command, "qwen3_toy", "device=cpu", *overrides.split(), *several)
    assert (ended.status, ended.out) == (2, "")
    for say in says:
        assert say in ended.err


def test_a_run_that_goes_on_needs_no_weights(here):
    """Its checkpoint has them; a new run with the same command does not begin. Its numerics are those of the run."""
    request = RunRequest("qwen3_toy", tuple(parse_all(["weights=none", "run.dir=run"])), continues=True)
    with pytest.raises(ConfigError, match="none: no such folder"):
        request.composed("cpu")
    (here / "run").mkdir()
    run = RunFile(
        model="qwen3_toy", overrides=(), device="cpu", layout={}, numerics={"mode": "gather"}, identity={},
        identity_hash="0" * 64, attempts=(),
    )  # fmt: skip
    (here / "run" / "run.json").write_text(json.dumps(run.as_json()))
    config = request.composed("cpu").config
    assert (config.weights.folder, config.numerics.mode) == ("none", "gather")


NAMED = {
    "one document of two parts": ({"blend": [["one"], None]}, "99,1,0", "without a document: one has 1 in all"),
    "in a blend": ({"blend": [["nine", "one"], [0.5, 0.5]]}, "90,10", "without a document: one has 1 in all"),
    "data_path with weights": ({"data_path": "0.5 nine 0.5 one"}, "90,10", "without a document: one has 1 in all"),
    "missing": ({"blend": [["none"], None]}, "1", "none.bin and .idx are no dataset of Megatron: No such file"),
    "of a part": ({"blend_per_split": [[["one"], None], [["none"], None], None]}, None, "none.bin and .idx are no"),
    "cut": ({"blend": [["cut"], None]}, "1", "the .idx tells of 4 tokens, and the .bin has 2 bytes"),
}


@pytest.mark.parametrize("name", NAMED)
def test_the_indexed_datasets_of_a_recipe_are_looked_at_before_the_start(tmp_path, monkeypatch, name):
    """Megatron's ranks look for the tokens of an empty part for ever."""
    monkeypatch.chdir(tmp_path)
    for number, prefix in ((1, "one"), (9, "nine"), (1, "cut")):
        Path(f"{prefix}.jsonl").write_text('{"text": "abc"}\n' * number)
        prepare(Path(f"{prefix}.jsonl"), Path(prefix))
    Path("cut.bin").write_bytes(b"ab")
    dataset, split, message = NAMED[name]
    config = compose("qwen3_toy", [], device="cpu").config.with_fields("data", kind="recipe")
    control = config.with_fields("dataset", blend=[["nine", "one"], None], split="1")
    assert input_problems(control) == []
    wrong = input_problems(config.with_fields("dataset", **dataset, split=split))
    assert len(wrong) == 1
    assert message in wrong[0]


def test_the_indexed_datasets_of_a_recipe_are_part_of_a_runs_identity(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("abc")
    prepare(tmp_path / "a.txt", tmp_path / "a")
    config = compose("qwen3_toy", [], device="cpu").config.with_fields("data", kind="recipe")
    config = config.with_fields("dataset", blend=[[str(tmp_path / "a")], None], split="1")
    first = plan._digest_of_named(config, plan.TO_TRAIN)
    assert first == read_index(tmp_path / "a").digest
    (tmp_path / "a.bin").write_bytes(np.array([1, 2, 3, 4], "u2"))
    assert plan._digest_of_named(config, plan.TO_TRAIN) != first
    (tmp_path / "a.bin").write_bytes(np.array([1, 2, 3, 60000], "u2"))
    with pytest.raises(ConfigError, match=r"a.bin holds token 60000, and model.vocab_size="):
        plan._digest_of_named(config, plan.TO_TRAIN)
