# SPDX-License-Identifier: Apache-2.0
"""The documents can be searched: terms of the field, and every environment variable that the product reads."""

import ast
import re

import pytest

from tests.source_trees import nodes
from tests.unit.docs.markdown import DOCUMENTS
from tp_invariant_recipes.settings.environment import FLASH, VARIABLES

PAGES = {document.name: document for document in DOCUMENTS}
# What an engineer searches -> the page that explains it.
TERMS = {
    "GEMM": "docs/numerics.md", "MLA": "docs/numerics.md", "MTP": "docs/numerics.md", "GQA": "docs/numerics.md",
    "SDC": "docs/guard.md", "silent data corruption": "docs/guard.md", "reduce-scatter": "docs/numerics.md",
    "symmetric memory": "docs/running.md", "all-to-all": "docs/numerics.md", "CUDA graphs": "docs/cuda-graphs.md",
    "straggler": "docs/troubleshooting.md", "sliding-window attention": "docs/coverage.md",
    "load-balancing loss": "docs/coverage.md", "attention sinks": "docs/coverage.md",
    "heartbeat timeout": "docs/running.md", "experiment fingerprint": "docs/glossary.md",
}  # fmt: skip
QUESTION = re.compile(r"\?$|^(?:how|what|which|is|do|does|can|why)\b", re.IGNORECASE)
VARIABLE = re.compile(r"[A-Z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+")
READS = re.compile(r"\b(?:environ|getenv)\b")


@pytest.mark.parametrize("term, page", TERMS.items())
def test_a_term_of_the_field_is_on_its_page(term, page):
    assert re.search(rf"\b{re.escape(term)}\b", re.sub(r"\s+", " ", PAGES[page].text), re.IGNORECASE)


def test_the_title_of_a_page_is_a_noun_phrase():
    titles = {name: re.search(r"^# (.*)", document.text, re.MULTILINE)[1] for name, document in PAGES.items()}
    assert {name: title for name, title in titles.items() if QUESTION.search(title)} == {}
    assert len(set(titles.values())) == len(titles)


def variables_read(tree: list[ast.AST]) -> set[str]:
    """Names of variables in expressions that read the environment, also by a constant of the module."""
    constants = {
        target.id: node.value.value
        for node in tree
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }
    found: set[str] = set()
    for node in tree:
        if not isinstance(node, ast.Call | ast.Subscript | ast.Compare) or not READS.search(ast.unparse(node)):
            continue
        for inner in ast.walk(node):
            name = inner.value if isinstance(inner, ast.Constant) else constants.get(getattr(inner, "id", ""))
            if isinstance(name, str) and VARIABLE.fullmatch(name):
                found.add(name)
    return found


def test_the_page_of_variables_has_each_that_the_product_reads():
    page = PAGES["docs/environment-variables.md"]
    listed = {name for span in page.spans for name in VARIABLE.findall(span)}
    read = {name for tree in nodes().values() for name in variables_read(tree)}
    assert len(read) > 25
    assert read | {row.name for row in (*VARIABLES, FLASH)} <= listed
    planted = [*ast.walk(ast.parse('KEY = "TPI_PLANTED"\nx = os.environ.get(KEY) or os.environ["TPI_OTHER"]'))]
    assert variables_read(planted) == {"TPI_PLANTED", "TPI_OTHER"}


def test_the_page_of_variables_has_the_values_of_the_table():
    (rows,) = (rows for header, rows in PAGES["docs/environment-variables.md"].tables if header[1] == "tpi sets")
    listed = {row[0].strip("`"): row[1].strip("`()") for row in rows}
    assert listed == {row.name: row.value or "unset" for row in VARIABLES}
