# SPDX-License-Identifier: Apache-2.0
"""Paths that lead to no file, or cannot be: a FIFO, a device, a folder, a name that is too long, a loop of links."""

import os
from pathlib import Path

import pytest

from tp_invariant_recipes.runs.run_dir import File, RunDir

LONG = "n" * 300
PATHS = ("fifo", "fifo.py", "fifo.txt", "fifo.jsonl", "fifo.yaml", "fifos", "/dev/zero", "/dev/null", "folder", "loop")
PATHS += (LONG, f"folder/{LONG}", f"{LONG}/x", f"{LONG}.txt", f"{LONG}.py", "a\nb", "/proc/self/mem", "fifo/x")

# Every word of a command line that is a path.
COMMANDS = (
    "compare {} run", "compare run {}", "compare --all run {}", "report {} --out page.html", "report run --out {}",
    "certify {}", "certify run --out {}", "certify --check {}", "runs {}", "check {} --step 1", "export {} out",
    "export run {} --step 3", "bisect {} run", "bisect run other --dir {}", "show --from {}",
    "train --resume {} --dry-run", "train recipe={}:f --dry-run", "train qwen3_toy cluster={} --dry-run",
    "train qwen3_toy weights={} --dry-run", "train qwen3_toy data=text data.path={} data.tokenizer=byte --dry-run",
    "train qwen3_toy data=text data.path=a.txt data.tokenizer={} --dry-run",
    "train qwen3_toy data=text data.path=a.txt data.tokenizer=byte data.cache={} --dry-run",
    "train qwen3_toy checkpoint.pretrained_checkpoint={} --dry-run", "train qwen3_toy run.dir={} --dry-run",
    "train qwen3_toy run.dir={} --continue --dry-run", "train qwen3_toy dataset.dataset_root={} --dry-run",
    "train qwen3_toy name={} project={} --dry-run", "train qwen3_toy ledger.dump=[{}] --dry-run",
    "verify qwen3_toy tp=1,2 --against {}", "verify qwen3_toy tp=1,2 --dir {}", "verify --recheck {}",
    "bench qwen3_toy --dir {}", "submit qwen3_toy cluster=h100 slurm.time=5 run.dir={} --dry-run",
    "submit --resume {} --dry-run", "data prepare {} --output out", "data prepare a.txt --output {}",
    "data prepare a.txt --tokenizer {}", "logs {}", "wait {}", "cancel {}", "conformance --check {}",
)  # fmt: skip

FILES_OF_RUN = [file.name for file in vars(RunDir).values() if isinstance(file, File) and "/" not in file.name]


def release(*values: object):
    return pytest.param(*values, marks=pytest.mark.release)


@pytest.fixture
def paths(run: Path) -> None:
    """The current directory: what PATHS name, two runs, a text, a folder of FIFOs in the place of files."""
    for file in ("fifo", "fifo.py", "fifo.txt", "fifo.jsonl", "fifo.yaml"):
        os.mkfifo(file)
    Path("folder").mkdir()
    Path("fifos").mkdir()
    for file in (*FILES_OF_RUN, "config.json", "model.safetensors", "tokenizer.json", "training.jsonl", "matrix.json"):
        os.mkfifo(Path("fifos", file))
    Path("loop").symlink_to("loop")
    Path("a.txt").write_text("a text")


SAMPLE = ("compare {} run", "train qwen3_toy cluster={} --dry-run", "logs {}")


@pytest.mark.parametrize("command", (*SAMPLE, *(release(command) for command in COMMANDS if command not in SAMPLE)))
def test_a_path_that_cannot_be_read_is_one_message_at_once(attack, paths, command):
    wrong = {}
    for path in PATHS:
        if result := attack(*command.format(*[path] * command.count("{}")).split(" ")):
            wrong[path] = result
    assert wrong == {}
