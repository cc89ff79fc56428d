"""No function has more than 60 lines of code or 15 branches, so that each can be read at once.

A function's parameters and its docstring, of a command the table of its options and their help, are not counted.
"""

import ast
from collections.abc import Iterable, Iterator

from tests.source_trees import nodes

LINES, BRANCHES = 60, 15
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def branches(function: ast.AST) -> int:
    """Places where a function's path splits: statements, expressions, each further operand of `and` and `or`."""
    count = 0
    for node in ast.walk(function):
        if isinstance(node, ast.If | ast.For | ast.While | ast.ExceptHandler | ast.IfExp | ast.match_case):
            count += 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
    return count


def too_long(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """The functions beyond the limits: name, and by what."""
    for node in nodes:
        if isinstance(node, FUNCTIONS):
            assert node.end_lineno is not None
            start = node.body[ast.get_docstring(node) is not None :][:1]
            lines = node.end_lineno - start[0].lineno + 1 if start else 0
            if (number := branches(node)) > BRANCHES:
                yield node.name, number
            elif lines > LINES:
                yield node.name, lines


def test_functions_are_short():
    beyond = {f"{path}:{name}": number for path, inner in nodes().items() for name, number in too_long(inner)}
    assert beyond == {}


def test_what_is_counted():
    source = "def f(x):\n    if x and x or y:\n        return [n for n in x if n]\n    return 1 if x else 2\n"
    assert branches(ast.parse(source)) == 6
    for source, beyond in (
        ('def f():\n    """Text."""\n' + "    pass\n" * 61, [("f", 61)]),
        ("def f():\n" + "    pass\n" * 60, []),
        ("def f(x):\n" + "    x = x or 1\n" * 16, [("f", 16)]),
        ("def f(x):\n" + "    x = x or 1\n" * 15, []),
    ):
        assert [*too_long(ast.walk(ast.parse(source)))] == beyond
