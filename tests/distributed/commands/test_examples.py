# SPDX-License-Identifier: Apache-2.0
"""The commands that the files of examples/ name pass `--dry-run` as they are, and train."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.unit.docs.markdown import DOCUMENTS

pytestmark = pytest.mark.usefixtures("families")

ROOT = Path(__file__).parents[3]
FILES = ("recipe.py", "finetuning/recipe.py", "cluster.yaml")


def commands(file):
    lines = re.findall(r"^(?:    |#   )tpi (.*)", (ROOT / "examples" / file).read_text(), re.M)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.fixture(scope="module")
def copied(shared):
    shutil.copytree(ROOT / "examples", shared.folder / "examples")
    return shared


@pytest.mark.parametrize("file", FILES)
def test_it_passes_a_dry_run_as_it_is(copied, file):
    first, *_ = commands(file)
    assert first[-1] == "--dry-run"
    copied(*first, status=0)


@pytest.mark.release
@pytest.mark.parametrize("file", FILES[:2])
def test_the_other_commands_end_well(copied, file):
    for command in commands(file)[1:]:
        more = ["--dir", file.replace("/", "-")] if command[0] == "verify" else []
        copied(*command, "iters=2", *more, status=0)


def test_the_page_shows_the_recipe():
    """docs/recipes.md leaves lines out with `…`, and adds none."""
    written = (ROOT / "examples/recipe.py").read_text().splitlines()
    page = next(document for document in DOCUMENTS if document.name == "docs/recipes.md").text
    block = page.partition("    def small():\n")[2].partition("    return cfg\n")[0]
    shown = [line[4:] for line in f"    def small():\n{block}    return cfg".splitlines() if line.strip() != "…"]
    assert len(shown) == 8
    assert [line for line in shown if line not in written] == []
