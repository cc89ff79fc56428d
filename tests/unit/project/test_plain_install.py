"""Without Megatron, torch and what comes with them: some commands work, others say in one sentence what they need."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tp_invariant_recipes.launch import plan
from tp_invariant_recipes.ledger.record import Header, LedgerWriter, StepRecord

ROOT = Path(__file__).resolve().parents[3]
ABSENT = ("torch", "megatron", "transformer_engine", "triton", "transformers", "numba", "wandb")

# Found on PYTHONPATH by every child process as it starts: these packages are not installed there.
SITE = f"""
import importlib.metadata, sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {ABSENT} else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path = [Hiding(finder) for finder in sys.meta_path]
distribution = importlib.metadata.distribution

def without(name):
    if name.replace("-", "_").startswith({ABSENT}):
        raise importlib.metadata.PackageNotFoundError(name)
    return distribution(name)

importlib.metadata.distribution = without
"""

# All commands in one process, since each start takes a second or two.
PROGRAM = """
import contextlib, io, json, sys
from tp_invariant_recipes.cli.main import main
for line in sys.stdin:
    words = json.loads(line)
    sys.argv, out, err = ["tpi", *words], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            status = stop.code
    print(json.dumps([status, out.getvalue(), err.getvalue()]), flush=True)
"""

# What works, and a word of what it prints.
WORK = (
    (["--help"], "bisect"),
    (["train", "--help"], "--resume"),
    (["--version"], "tpi "),
    (["show", "--all", "qwen3_8b", "tp=4", "optimizer.adam_eps=1e-7"], "adam_eps: 1.0e-07"),
    (["show", "nemotron3_nano_toy", "--key", "tp"], "1"),
    (["show", "--diff", "qwen3_toy", "qwen3_toy seed=3"], "rng.seed: 1234 -> 3"),
    (["compare", "runs/a", "runs/b"], "identical"),
    (["report", "runs/a", "runs/b"], "wrote report.png"),
    (["certify", "runs/a"], "certificate hash"),
    (["certify", "--check", "a.tpicert"], "certificate hash"),
    (["runs"], "runs/a"),
    (["jobs"], "none in the queue"),
    (["submit", "qwen3_toy", "device=cpu", "cluster.ranks_per_node=1", "slurm.time=5", "--dry-run"], "#SBATCH"),
)
# What needs a package, and the one sentence that it says.
NEED = (
    (["train", "qwen3_toy"], "tpi train needs megatron-bridge, megatron-core and torch, which are not installed"),
    (["train", "qwen3_toy", "--dry-run"], "tpi train needs megatron-bridge"),
    (["train", "--resume", "runs/a"], "tpi train needs megatron-bridge"),
    (["verify", "qwen3_toy", "tp=1,2"], "tpi verify needs megatron-bridge"),
    (["bench", "qwen3_toy"], "tpi bench needs megatron-bridge"),
    (["audit", "qwen3_toy", "--against", "pp=2"], "tpi audit needs megatron-bridge"),
    (["export", "runs/a", "out"], "tpi export needs megatron-bridge"),
    (["conformance"], "tpi conformance needs torch, which is not installed here: make bootstrap"),
    # Only Bridge knows what this field takes.
    (["show", "qwen3_toy", "model.attention_backend=unfused"], "tpi show needs megatron-bridge"),
)
MISTAKES = (
    (["show", "qwen3_toy", "optimizer.adam_epz=1"], "did you mean 'optimizer.adam_eps'?"),
    (["show", "qwen3_toi"], "did you mean 'qwen3_toy'?"),
)


@pytest.fixture
def two_runs(tmp_path_factory) -> Path:
    """Two runs that are equal, and a text."""
    path = tmp_path_factory.mktemp("plain")
    for name in "ab":
        (path / "runs" / name).mkdir(parents=True)
        header = Header(identity={"rng.seed": 1})
        with LedgerWriter(path / "runs" / name).create(header) as ledger:
            ledger.append(StepRecord(1, 1, 1, "f32:40c80000", "f32:3fa00000", "f64:3f33a92a30553261"))
        run = {"model": "qwen3_toy", "identity_hash": header.identity_hash, "layout": {"tp": 1}, "attempts": []}
        (path / "runs" / name / "run.json").write_text(json.dumps(run))
        (path / "runs" / name / "config.yaml").write_text("train: {train_iters: 1}\n")
        for file in ("environment.json", "versions.json"):
            (path / "runs" / name / file).write_text("{}")
    (path / "text.txt").write_text("a\n")
    return path


def run_commands(folder: Path, interpreter: list[str], lines: list[list[str]], **variables: str) -> list[list]:
    """Exit status, standard output and error of each."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [*interpreter, "-c", PROGRAM],
        cwd=folder,
        env=own | {"PATH": str(folder)} | variables,
        input="".join(f"{json.dumps(words)}\n" for words in lines),
        capture_output=True,
        text=True,
    )
    results = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(results) == len(lines), ended.stdout + ended.stderr
    return results


def check_rows(results: list[list]) -> None:
    rows = [*((w, 0, o) for w, o in WORK), *((w, 2, e) for w, e in NEED), *((w, 2, e) for w, e in MISTAKES)]
    wrong = []
    for (words, status, says), (code, out, err) in zip(rows, results, strict=True):
        status = 1 if "--diff" in words else status
        text = err if status == 2 else out
        single_sentence = status != 2 or len(err.splitlines()) == 1
        if code != status or says not in text or "Traceback" in err or "defect" in err or not single_sentence:
            wrong.append((words, code, out[-500:], err[-500:]))
    assert not wrong, "\n".join(map(str, wrong))


ALL = [words for words, _ in (*WORK, *NEED, *MISTAKES)]


@pytest.fixture
def hiding_site(tmp_path) -> str:
    """A folder for PYTHONPATH in which `sitecustomize` hides what a plain install lacks, and this package."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    return os.pathsep.join((str(tmp_path / "site"), str(ROOT)))


@pytest.mark.release
def test_commands_without_megatron_and_torch(two_runs, hiding_site):
    check_rows(run_commands(two_runs, [sys.executable], ALL, PYTHONPATH=hiding_site))
    assert not (two_runs / "data").exists()
    assert sorted(run.name for run in (two_runs / "runs").iterdir()) == ["a", "b"]


def _pip(interpreter: Path, *words: str) -> None:
    """Run pip. A failure fails the test: without a package index this promise cannot be checked, and is not kept."""
    ended = subprocess.run([str(interpreter), "-m", "pip", *words], capture_output=True, text=True)
    if ended.returncode:
        pytest.fail(f"pip {words[0]} failed; this test needs the package index:\n{ended.stderr[-2000:]}", pytrace=False)


@pytest.mark.release
@pytest.mark.timeout(1200)
def test_the_wheel_in_an_empty_environment(two_runs, tmp_path):
    """What `pip install` of the built wheel brings: conf/, the templates of slurm/, and no torch."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)  # with pip, which .venv lacks
    python = tmp_path / "venv" / "bin" / "python"
    _pip(python, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("*.whl")
    _pip(python, "install", str(wheel))
    completed = subprocess.run(
        [python, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True
    )
    names = {package["name"].replace("-", "_") for package in json.loads(completed.stdout)}
    assert not names & {"torch", "triton", "megatron_core", "megatron_bridge", "transformer_engine"}
    check_rows(run_commands(two_runs, [str(python)], ALL))
    listed = subprocess.run([tmp_path / "venv" / "bin" / "tpi", "models"], capture_output=True, text=True, cwd=tmp_path)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "nemotron3_nano_toy" in listed.stdout


@pytest.mark.parametrize("name", ("nowhere", "tp_invariant_recipes.nowhere", "torch.nowhere", "megatron.core.nowhere"))
def test_a_module_that_is_missing_for_another_reason_is_a_defect(cli, monkeypatch, no_gpus, name):
    """The control: only a package that is not installed makes that sentence, and no broken one."""

    def fail(*_: object, **__: object) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(plan, "new", fail)
    ended = cli("train", "qwen3_toy")
    assert ended.status == 2
    assert "Traceback" in ended.err
    assert "this is a defect of tpi" in ended.err


def test_what_is_hidden_is_what_a_plain_install_lacks():
    """No dependency of the wheel is hidden here but numba, which only training needs."""
    project = importlib.metadata.requires("tp-invariant-recipes") or []
    plain = {re.split(r"[^\w-]", text)[0].replace("-", "_") for text in project if "extra ==" not in text}
    assert plain & set(ABSENT) == {"numba"}
    assert {"hydra_core", "typer", "rich"} <= plain
