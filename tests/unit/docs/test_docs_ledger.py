"""The tables of docs/ledger.md are those of the ledger's dataclasses."""

import json
import runpy
from pathlib import Path

from tests.unit.ledger.test_ledger_digests import HEADER, RECORD
from tp_invariant_recipes.ledger.lines import encode_step

ROOT = Path(__file__).parents[3]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "ledger-table"))
PAGE = (ROOT / "docs" / "ledger.md").read_text(encoding="utf-8")


def test_the_page_has_the_tables_of_the_dataclasses():
    assert SCRIPT["page"](PAGE) == PAGE


def test_every_key_of_a_step_has_a_row():
    assert set(json.loads(encode_step(RECORD, HEADER))) <= set(SCRIPT["fields"](type(RECORD)))
