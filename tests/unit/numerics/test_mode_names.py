# SPDX-License-Identifier: Apache-2.0
"""Whatever depends on the mode of numerics asks its value: no module compares a mode's name."""

import ast
from pathlib import Path

from tests.source_trees import trees
from tp_invariant_recipes.numerics import mode

NAMES = {*mode.NAMES}


def compared(tree: ast.AST) -> list[int]:
    """The lines of a module that compare something with the name of a mode, or look one up in a table by it."""
    results = []
    for node in ast.walk(tree):
        sides = [*node.comparators, node.left] if isinstance(node, ast.Compare) else []
        sides += node.keys if isinstance(node, ast.Dict) else []
        words = [
            each for side in sides if side is not None for each in ast.walk(side) if isinstance(each, ast.Constant)
        ]
        results += [node.lineno for word in words if word.value in NAMES]
    return sorted(results)


def test_a_comparison_is_detected():
    source = 'if mode == "portable" or mode in ("tree", "gather"):\n    pass\nTABLE = {"stock": 1}\n'
    assert compared(ast.parse(source)) == [1, 1, 1, 3]


def test_no_module_compares_the_name_of_a_mode():
    results = {file: compared(tree) for file, tree in trees().items()}
    table = Path("numerics/mode.py")
    assert results.pop(table)
    assert {str(file): lines for file, lines in results.items() if lines} == {}
