"""The hook of .pre-commit-config.yaml that refuses long subjects."""

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

CONFIG = Path(__file__).resolve().parents[3] / ".pre-commit-config.yaml"


@pytest.mark.parametrize("length, status", ((1, 0), (72, 0), (73, 1)))
def test_a_subject_has_at_most_72_characters(tmp_path, length, status):
    hooks = yaml.safe_load(CONFIG.read_text())["repos"][0]["hooks"]
    (hook,) = (hook for hook in hooks if hook.get("stages") == ["commit-msg"])
    message = tmp_path / "COMMIT_EDITMSG"
    message.write_text("×" * length + "\n\n" + "A body may be longer than that. " * 4 + "\n")
    command = [*shlex.split(hook["entry"]), message]
    env = {"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"}
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == status
    assert (f"it has {length}" in result.stdout) == bool(status)
