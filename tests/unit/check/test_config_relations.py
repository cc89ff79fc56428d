# SPDX-License-Identifier: Apache-2.0
"""Numbers out of their range, sizes that do not fit each other, keys that a run would replace: each is one problem.

Every row trained, or ended in a traceback or an error of a library, before there was a rule.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.data.text import PreparedData
from tp_invariant_recipes.errors import ConfigError, TpiError
from tp_invariant_recipes.launch import plan
from tp_invariant_recipes.launch.record import RunRequest


@pytest.mark.parametrize("model, fused", (("gpt_oss_toy", False), ("qwen3_moe_toy", True), ("qwen3_toy", True)))
def test_dropout_is_fused_by_default_but_for_biases_of_experts(model, fused):
    """GPT-OSS's layers of Transformer Engine asserted in a rank."""
    assert compose(model, [], device="gpu").config.model["bias_dropout_fusion"] is fused


# --- folders and runs ---------------------------------------------------------------------------------------


@pytest.fixture
def folders_here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("no checkpoint")
    (tmp_path / "empty").mkdir()
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "latest_train_state.pt").touch()
    return tmp_path


FOLDERS = (
    ("a.txt", "is a file; name the folder of the checkpoint"), ("none", "there is no such folder"),
    ("empty", "holds no checkpoint of Megatron-Bridge"), ("some", None),
)  # fmt: skip


@pytest.mark.parametrize("path, why", FOLDERS)
def test_weights_to_begin_with_must_be_there(folders_here, path, why):
    asked = RunRequest("qwen3_toy", tuple(parse_all([f"checkpoint.pretrained_checkpoint={path}"])))
    if why is None:
        asked.plan(asked.composed("cpu"))
        return
    with pytest.raises(ConfigError) as refused:
        asked.plan(asked.composed("cpu"))
    assert str(refused.value).startswith(f"checkpoint.pretrained_checkpoint={path}: {why}")
    assert not (folders_here / "runs").exists()


@pytest.mark.parametrize("where, refused", (("other", True), ("./a/../run", False), ("run", False), ("null", True)))
def test_a_resumed_run_stays_where_it_is(folders_here, where, refused):
    asked = RunRequest(None, tuple(parse_all([f"run.dir={where}"])), resume=Path("run"))
    with pytest.raises(TpiError) as error:  # there is no run in either case
        asked.composed("cpu")
    assert ("--resume run goes on in run: leave out run.dir=" in str(error.value)) == refused


def test_a_step_to_begin_at_needs_a_run(folders_here):
    asked = RunRequest("qwen3_toy", tuple(parse_all(["checkpoint.ckpt_step=5"])))
    with pytest.raises(ConfigError, match=r"checkpoint\.ckpt_step=5: a new run begins at step 0"):
        asked.plan(asked.composed("cpu"))


@pytest.mark.parametrize("split, documents, wrong", (("90,5,5", 1, True), ("90,5,5", 20, False), ("9,1,0", 1, True)))
def test_a_part_of_the_text_without_a_document_is_refused(split, documents, wrong):
    """Megatron goes through its documents until it has enough tokens."""
    config = compose("qwen3_toy", ["data=text", "data.path=a.txt", f"dataset.split='{split}'"], device="cpu").config
    data = PreparedData(Path("text"), vocab_size=257, eod=256, documents=documents, tokens=99, digest="0")
    with pytest.raises(ConfigError, match="has a part without a document: text has 1") if wrong else nullcontext():
        plan._with_data(config, data)
