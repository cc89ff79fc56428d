"""No public class of the package has the name of another: a name in an error or a trace means one thing."""

import ast
from collections import defaultdict

from tests.source_trees import trees


def classes() -> dict[str, list[str]]:
    """Public class → the modules that define it, classes inside of others included."""
    result = defaultdict(list)
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                result[node.name].append(str(file))
    return result


def test_no_public_class_has_the_name_of_another():
    results = classes()
    assert len(results) > 100
    assert {name: files for name, files in results.items() if len(files) > 1} == {}
