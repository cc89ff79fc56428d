"""The models of `conf/model/` with their sizes, from a file: composing them all takes 25 s.

`scripts/model-table` writes the file, and a test composes the models and compares.
"""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("models.json")


def rows() -> list[dict[str, Any]]:
    """Return a row per model, as `config.describe.model` makes it, in the order of names."""
    table: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return table
