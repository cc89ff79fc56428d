"""Files that a run names and that are not there stand in one list with the settings that are wrong."""

import pytest

from tests import hf_folders
from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.launch.request import RunRequest

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


def test_weights_of_another_size_stand_in_the_same_list(cli, here, no_gpus):
    hf_folders.make(here / "other", hf_folders.model_section("qwen3_toy", "model.num_layers=1"))
    ended = cli("train", "qwen3_toy", "device=cpu", "weights=other", "tp=3", "data=text", "data.path=none")
    assert (ended.status, ended.out) == (2, "")
    for name in ("tp=3 does not divide", "its num_hidden_layers is 1; model.num_layers=1", "data.tokenizer=byte"):
        assert name in ended.err


def test_a_run_that_goes_on_needs_no_weights(here):
    """Its checkpoint has them; a new run with the same command does not begin."""
    request = RunRequest(
        "qwen3_toy", tuple(parse_all(["weights=none", "run.dir=run", "numerics=tree"])), continues=True
    )
    with pytest.raises(ConfigError, match="none: no such folder"):
        request.composed("cpu")
    (here / "run").mkdir()
    (here / "run" / "run.json").write_text("{}")
    assert request.composed("cpu").config.weights.folder == "none"


def test_files_of_a_job_are_listed_with_its_settings(cli, here, no_gpus):
    arguments = ("qwen3_toy", "cluster=h200", "data=text", "data.path=none", "data.tokenizer=byte", "tp=3")
    ended = cli("submit", *arguments)
    assert ended.status == 2
    assert "tp=3 does not divide" in ended.err
    assert "data.path=none: no file or folder of text" in ended.err
    assert "data.path" not in cli("submit", *arguments, "--dry-run").err
