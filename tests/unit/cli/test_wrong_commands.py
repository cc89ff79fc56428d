"""Wrong command lines, made by a script: each ends with status 2 and one message, and leaves nothing behind.

Those of the first test run in this process, where an import of Megatron-Bridge fails the test.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli import wrong_commands
from tp_invariant_recipes.settings.tables import field_table

SEED = 14
FEW, ALL = 20, 500  # 20: one of each class

MESSAGE = re.compile(r"^(error|not comparable): |^╭─ Error ─", re.M)
IN_JSON = re.compile(r'^  "error": "', re.M)  # of --json, on standard output
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
HEAVY = ("torch", "transformers", "megatron.core", "megatron.bridge")

PROGRAM = f"""
import atexit, sys
atexit.register(lambda: print("heavy:", sorted(set({HEAVY}) & set(sys.modules)), file=sys.stderr))
from tp_invariant_recipes.cli.main import main
main()
"""


@pytest.fixture
def stocked_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the lines find: a text, a cluster's file, an empty folder, no SLURM."""
    folder = tmp_path / "here"
    (folder / "a").mkdir(parents=True)
    (folder / "a.txt").write_text("neither a run nor a checkpoint\n")
    (folder / "site.yaml").write_text("# @package _global_\ndefaults:\n  - local\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def problem(status: int, out: str, err: str) -> str | None:
    """What is wrong with how a command ended."""
    if "Traceback" in err or "defect of tpi" in err:
        return "a traceback"
    if "[Errno" in out + err:
        return "a number of an error"
    messages = len(MESSAGE.findall(err)) + len(IN_JSON.findall(out))
    if (status, messages) != (2, 1):
        return f"status {status}, {messages} messages"
    return "control characters" if CONTROL.search(out + err) else None


@pytest.mark.parametrize("count", (FEW, pytest.param(ALL, marks=pytest.mark.release)))
@pytest.mark.timeout(600)
def test_each_is_one_message_and_leaves_nothing(cli, stocked_folder, count):
    before = contents(stocked_folder)
    wrong = {}
    for words in wrong_commands.lines(count, SEED):
        ended = cli(*words)
        result = problem(ended.status, ended.out, ended.err)
        if contents(stocked_folder) != before:
            result, before = "files", contents(stocked_folder)
        if result:
            wrong[" ".join(map(ascii, words))] = result
    assert wrong == {}


@pytest.mark.release  # in `make test`: the same lines in one process, and test_cli_main.py, what commands import
def test_real_processes_end_alike(stocked_folder):
    field_table.in_cache().parent.mkdir(parents=True)
    shutil.copy(field_table.in_environment(), field_table.in_cache())
    typo = ["train", "qwen3_toy", "model.num_layer=3"]
    before = contents(stocked_folder)
    for words in [typo, *wrong_commands.lines(40, SEED + 1)]:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, errors="replace"
        )
        message, _, heavy = ended.stderr.rpartition("heavy: ")
        assert (problem(ended.returncode, ended.stdout, message), heavy) == (None, "[]\n"), (words, ended.stderr)
        assert contents(stocked_folder) == before, words


def test_the_lines_are_the_same_for_the_same_seed():
    made = wrong_commands.lines(ALL, SEED)
    assert made == wrong_commands.lines(ALL, SEED)
    assert made != wrong_commands.lines(ALL, SEED + 1)
    assert len({tuple(words) for words in made}) == ALL


@pytest.mark.parametrize("status, err", ((0, ""), (1, "error: a\n"), (2, "error: a\nerror: b\n"), (2, "error: \x1b")))
def test_a_command_that_ends_otherwise_is_detected(status, err):
    assert problem(status, "", err)
    assert problem(2, "", "Traceback (most recent call last):\nerror: a")
    assert not problem(2, "", "error: a\n")
    assert not problem(2, '{\n  "error": "a"\n}\n', "")
    assert problem(2, '{\n  "error": "a"\n}\n', "error: a\n")
