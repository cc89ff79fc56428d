"""`tpi init` writes files to begin with, and overwrites none.

tests/distributed/commands/test_init_runs.py trains them.
"""

import errno
import os
from pathlib import Path

import pytest

from tests.unit.docs.markdown import DOCUMENTS
from tp_invariant_recipes.cli.init import KINDS, TEMPLATES

# Where each kind is written.
PATHS = {"recipe": "my_recipes.py", "sft": "my_sft", "lora": "my_lora", "cluster": "my_cluster.yaml"}


@pytest.mark.parametrize("kind", KINDS)
def test_it_writes_a_file_and_never_another_time(cli, here, kind):
    done = cli("init", kind)
    assert done.status == 0
    assert done.out.startswith(f"wrote {PATHS[kind]}")
    files = {file: file.read_bytes() for file in here.rglob("*") if file.is_file()}
    repeated = cli("init", kind)
    assert (repeated.status, repeated.out) == (2, "")
    assert f"{PATHS[kind]} exists, and tpi init overwrites nothing" in repeated.err
    assert files == {file: file.read_bytes() for file in here.rglob("*") if file.is_file()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_link_to_nowhere_is_not_followed(cli, here, kind):
    (here / PATHS[kind]).symlink_to(here / "elsewhere")
    assert cli("init", kind).status == 2
    assert not (here / "elsewhere").exists()


def test_a_wrong_kind_names_the_kinds(cli, here):
    done = cli("init", "recip")
    assert done.status == 2
    assert "tpi init recip: WHAT is one of recipe, sft, lora, cluster; did you mean 'recipe'?" in done.err


def test_a_folder_without_permission_is_named(cli, here, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "my_recipes.py")

    monkeypatch.setattr(Path, "open", refuse)
    done = cli("init", "recipe")
    assert (done.status, done.out) == (2, "")
    assert "my_recipes.py: Permission denied" in done.err


def test_every_template_belongs_to_a_kind():
    assert {folder.name for folder in TEMPLATES.iterdir()} == {*KINDS} == PATHS.keys()


def test_the_page_shows_the_recipe_that_is_written():
    """docs/recipes.md leaves lines out with `…`, and adds none."""
    written = iter((TEMPLATES / "recipe" / "my_recipes.py.txt").read_text().splitlines())
    page = next(document for document in DOCUMENTS if document.name == "docs/recipes.md").text
    block = page.partition("    def small():\n")[2].partition("    return cfg\n")[0]
    shown = [line[4:] for line in f"    def small():\n{block}    return cfg".splitlines() if line.strip() != "…"]
    assert len(shown) == 8
    assert [line for line in shown if line not in written] == []
