"""Composed trees with single fields changed, as no command line would."""

import copy
from typing import Any


def with_fields(tree: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A copy of a tree with other fields, named section__field."""
    tree = copy.deepcopy(tree)
    for name, value in fields.items():
        section, field = name.split("__")
        tree[section][field] = value
    return tree
