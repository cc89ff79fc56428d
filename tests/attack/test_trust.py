# SPDX-License-Identifier: Apache-2.0
"""Run directories from elsewhere run no code: what they name runs only if it is typed again, or with --trust-recipe."""

import json
from pathlib import Path

import pytest
import yaml

from tests.unit.cli.test_wrong_commands import MESSAGE
from tp_invariant_recipes.launch import trust
from tp_invariant_recipes.ledger.run_files import RunFile
from tp_invariant_recipes.runs.checkpoints import MANIFEST
from tp_invariant_recipes.runs.run_dir import RunDir

EVIL = "open({!r}, 'w').close()\n\ndef small(*arguments):\n    return None\n"
RAN = "code-was-executed"
# Every command that composes a run anew from what a folder says.
COMMANDS = (
    "show --from run lr=1e-3", "show --diff run other lr=1e-3", "train --resume run iters=6",
    "train --resume run iters=6 --dry-run",
    "submit --resume run cluster.name=site cluster.gpus_per_node=0 cluster.ranks_per_node=1 slurm.time=5 --dry-run",
    "score run sequences.jsonl", "generate run sequences.jsonl --dry-run", "bisect run other",
)  # fmt: skip
# What a forged run.json names: a recipe in the place of the model, or an override.
NAMES = {
    "a recipe's file": "recipe={here}/evil.py:small",
    "a recipe's file, relative": "recipe=evil.py:small",
    "a recipe's module": "recipe=evil_module:small",
    "a function by its path": "model.activation_func=evil_module.small",
    "a function of another package's module": "model.activation_func=torch.os.system",
    "a class of the model": "model._target_=evil_module.small",
    "a cluster's file": "cluster={here}/evil.yaml",
    "variables": "+cluster.environment.PYTHONSTARTUP={here}/evil.py",
    "an interpreter": "cluster.python={here}/evil.py",
    "lines of bash": 'slurm.setup=["touch {here}/' + RAN + '"]',
    "options of sbatch": "slurm.options=[--prolog=evil]",
    "code of a tokenizer": "tokenizer.hf_tokenizer_kwargs={trust_remote_code:true}",
}
TABLE = [(name, command) for name in NAMES for command in COMMANDS]
# `make test` has each name and each command three times at least.
FEW = [(n, c) for i, n in enumerate(NAMES) for j, c in enumerate(COMMANDS) if (i + j) % 2 == 0]


@pytest.fixture
def forge(attack, run, cli, monkeypatch):
    """Forge run directories, and see that a command refuses them and runs nothing."""
    here = Path.cwd()
    monkeypatch.syspath_prepend(here)
    monkeypatch.setattr(trust, "trusted", [])
    for name in ("evil.py", "evil_module.py"):
        (here / name).write_text(EVIL.format(str(here / RAN)))
    (here / "evil.yaml").write_text(f"environment: {{PYTHONSTARTUP: {here / 'evil.py'}}}\n")
    (here / "sequences.jsonl").write_text('{"id": "a", "tokens": [1, 2, 3], "prompt": [1, 2]}\n')
    ledger = Path("other", "ledger.jsonl")
    ledger.write_text(ledger.read_text().replace('"f32:40c80000", "value": 6.25', '"f32:40d00000", "value": 6.5'))

    def forged(named: str) -> None:
        for folder in ("run", "other"):
            _rewrite(Path(folder), named.replace("{here}", str(here)))

    def refused(command: str, named: str) -> None:
        ended = cli(*command.split())
        assert not (here / RAN).exists(), command
        assert ended.status == 2, f"{command}: {ended.status}\n{ended.out}{ended.err}"
        assert len(MESSAGE.findall(ended.err)) == 1, ended.err
        assert "Traceback" not in ended.err
        assert named in ended.err, ended.err

    def runs(command: str) -> None:
        assert "a recipe returns a ConfigContainer" in cli(*command.split()).err
        assert (here / RAN).exists()

    forged.refused, forged.runs, forged.here = refused, runs, here
    return forged


def _rewrite(folder: Path, named: str) -> None:
    run = json.loads((folder / "run.json").read_text())
    run |= {"model": named} if named.startswith("recipe=") else {"overrides": [*run["overrides"], named]}
    (folder / "run.json").write_text(json.dumps(run))


@pytest.mark.parametrize(
    "name, command", [pytest.param(*c, id=" | ".join(c), marks=[] if c in FEW else pytest.mark.release) for c in TABLE]
)
def test_code_that_a_forged_run_names_is_refused(forge, name, command):
    forge(NAMES[name])
    forge.refused(command, "--trust-recipe")


def _edited(file: Path, change) -> None:
    data = yaml.safe_load(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def _manifest(**files: str):
    entry = {"bytes": 1, "xxh3_128": "0" * 32}
    return lambda: [
        _edited(file, lambda manifest: manifest.update(files=dict.fromkeys(files.values(), entry)))
        for file in Path("run/checkpoints").glob(f"*/{MANIFEST}")
    ]


def _config(**model: object):
    return lambda: _edited(Path("run/config.yaml"), lambda config: config["model"].update(model))


def _matrix(**fields: object):
    cell = {"name": "tp1", "label": "tp=1", "overrides": ["tp=1"], "ranks": 1, "steps": 4, "identity_hash": "0" * 64}
    cell |= {"layout": {"tp": 1}, "numerics": {}}
    return lambda: Path("run/matrix.json").write_text(
        json.dumps(
            {"schema": 1, "model": "qwen3_toy", "overrides": [], "axes": [], "cells": [cell], "against": None} | fields
        )
    )


def _submission(job: str):
    submission = {"schema": 1, "jobs": [{"id": job, "role": "train"}]}
    return lambda: Path("run/submission.json").write_text(json.dumps(submission))


# What else is forged, the commands that read it, and a part of their message.
OTHERS = {
    "a manifest without files": (
        _manifest(),
        ("train --resume run iters=6", "export run out", "score run sequences.jsonl"),
        "is not in its manifest",
    ),
    "a manifest of a file above": (
        _manifest(a="../../run.json"),
        ("train --resume run iters=6", "export run out"),
        "../../run.json",
    ),
    "a manifest of a file elsewhere": (
        _manifest(a="/etc/passwd"),
        ("train --resume run iters=6", "export run out"),
        "/etc/passwd",
    ),
    "a configuration's function": (_config(activation_func="evil_module.small"), ("export run out",), "--trust-recipe"),
    "a configuration's class": (_config(_target_="evil_module.small"), ("export run out",), "--trust-recipe"),
    "a job that is an option of scancel": (_submission("--user=root"), ("cancel run", "logs run"), "jobs.0.id"),
    "a matrix's recipe": (_matrix(model="recipe=evil.py:small"), ("verify --last-failed --dir run",), "--trust-recipe"),
}


@pytest.mark.parametrize("name, command", [(n, c) for n, (_, commands, _) in OTHERS.items() for c in commands])
def test_other_forged_files_are_refused(forge, name, command):
    make, _, message = OTHERS[name]
    make()
    forge.refused(command, message)


RECIPE = "recipe={here}/evil.py:small"


def _own(here: Path) -> None:
    """Make the run one that this user's tpi has written, of the recipe."""
    _rewrite(Path("run"), RECIPE.replace("{here}", str(here)))
    run = RunDir(Path("run"))
    run.write(run.run, trust.sealed(run.read_run(RunFile), run.config))


# What happens to a run of one's own after it was sealed, and what is said then.
CHANGES = {
    "another recipe": (lambda here: (here / "evil.py").open("a").write("\n"), "somebody has changed it or the recipe"),
    "a file that others can write": (lambda here: (here / "evil.py").chmod(0o666), "others can write"),
    "a folder that others can write": (lambda here: here.chmod(0o777), "others can write"),
    "another override": (lambda here: _rewrite(Path("run"), "lr=1"), "your tpi has not written"),
    "another configuration": (lambda here: _config(num_layers=2)(), "your tpi has not written"),
    "a key that others can read": (lambda here: (here.parent / "state/tpi/seal.key").chmod(0o644), "your tpi has not"),
    "a key of another user": (lambda here: (here.parent / "state/tpi/seal.key").write_bytes(bytes(32)), "your tpi has"),
}


def test_a_run_of_ones_own_names_its_recipe(forge):
    _own(forge.here)
    assert not (forge.here / RAN).exists()
    forge.runs("show --from run lr=1e-3")


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_of_ones_own_that_was_changed_is_refused(forge, change):
    _own(forge.here)
    CHANGES[change][0](forge.here)
    forge.refused("train --resume run iters=6", CHANGES[change][1])


@pytest.mark.parametrize("words", ("show --from run lr=1e-3 --trust-recipe", "train {recipe} --resume run --dry-run"))
def test_a_recipe_that_is_typed_or_trusted_runs(forge, words):
    forge(RECIPE)
    forge.runs(words.replace("{recipe}", RECIPE.replace("{here}", str(forge.here))))
