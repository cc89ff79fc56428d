# SPDX-License-Identifier: Apache-2.0
"""The public names: imported late, typed, and the only ones that examples use."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tp_invariant_recipes as tpi
from tests.source_trees import PROJECT
from tp_invariant_recipes import errors

USER = Path(__file__).with_name("user_program.py")
# As the project's own: neither is typed, and both are large.
MYPY = "[mypy]\nignore_missing_imports = true\n[mypy-megatron.*,transformers.*]\nfollow_imports = skip\n"


def python(code, **variables):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | variables
    )
    return done.stdout.strip()


def test_the_import_is_quick_and_brings_neither_torch_nor_megatron():
    code = (
        "import sys, time; begun = time.process_time(); import tp_invariant_recipes as tpi; "
        "spent = time.process_time() - begun; tpi.__all__; "
        "print(spent, *[name for name in ('torch', 'megatron', 'numpy', 'rich') if name in sys.modules])"
    )
    said = [python(code).split() for _ in range(5)]
    assert [names for _, *names in said] == [[]] * 5
    assert min(float(seconds) for seconds, *_ in said) < 0.05


def test_comparing_and_certifying_need_neither_torch_nor_megatron(tmp_path):
    code = "import sys, tp_invariant_recipes as tpi; tpi.compare, tpi.certify, tpi.Ledger, tpi.Run, tpi.TpiError; "
    assert python(f"{code} print([name for name in ('torch', 'megatron') if name in sys.modules])") == "[]"


def test_every_name_has_a_home():
    tree = ast.parse(Path(tpi.__file__).read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {name.name: node.module for node in checked.body for name in node.names}
    assert {*tpi.__all__} == typed.keys() == tpi._HOME.keys()
    assert {name: f"tp_invariant_recipes.{home}" for name, home in tpi._HOME.items()} == typed
    for name in {*tpi.__all__} - {"LedgerCallback"}:  # whose base is Bridge's
        assert getattr(tpi, name).__doc__, name
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, tpi.TpiError)}
    assert kinds == {name for name, home in tpi._HOME.items() if home == "errors"}
    with pytest.raises(AttributeError, match="compere"):
        _ = tpi.compere


def test_names_stay_what_they_are_after_everything_is_imported():
    """A package of one of these names would take its place once it is imported."""
    assert not [name for name in tpi.__all__ if (Path(tpi.__file__).parent / name).exists()]
    assert not [name for name in tpi.__all__ if (Path(tpi.__file__).parent / f"{name}.py").exists()]


def test_public_docstrings_say_arguments_results_and_errors():
    for name in ("train", "compare", "verify", "bisect", "certify", "score", "audit", "recipe", "pretrain"):
        doc = getattr(tpi, name).__doc__
        assert all(part in doc for part in ("\n    Args:\n", "\n    Raises:\n")), name
        assert name == "pretrain" or "\n    Returns:\n" in doc, name


def test_examples_use_public_names_only():
    files = [*(PROJECT / "examples").rglob("*.py"), *(PROJECT / "examples").rglob("*.ipynb")]
    assert len(files) >= 5
    used = {}
    for file in files:
        text = file.read_text()
        assert not re.search(r"from tp_invariant_recipes|import tp_invariant_recipes\.", text), file
        used[file.name] = set(re.findall(r"\btpi\.(\w+)", text)) - {"train_iters"}
        assert used[file.name] <= {*tpi.__all__}, file
    assert used["grpo.py"] >= {"recipe", "pretrain", "Engine"}


@pytest.mark.release
@pytest.mark.parametrize("mistake", ("", "tpi.compare(1)", "tpi.Ledger.open('a')[0].loss.value"))
def test_a_users_program_passes_mypy_strict(tmp_path, mistake):
    """Controls: an argument of another type, and a number that may be None."""
    (tmp_path / "user.py").write_text(USER.read_text().replace("    try:\n", f"    {mistake}\n    try:\n"))
    (tmp_path / "mypy.ini").write_text(MYPY)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(PROJECT / ".mypy_cache/user"), "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == bool(mistake), done.stdout
    assert re.search(r"^user\.py:\d+: error", done.stdout, re.M) or not mistake, done.stdout
