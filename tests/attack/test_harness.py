"""The attacks find a command that ends as none may."""

import time

import pytest

from tp_invariant_recipes.errors import LedgerError
from tp_invariant_recipes.ledger import open as ledger_open


@pytest.mark.parametrize(
    "error, result",
    (
        (ValueError("planted"), "a traceback: ValueError: planted"),
        (GeneratorExit(), "GeneratorExit came out of main()"),
        (SystemExit(1), "status 1"),
        (SystemExit(0), "status 0"),
        (SystemExit(2), "status 2, 0 messages"),
        (LedgerError("a\nerror: b"), "2 messages"),
    ),
)
def test_an_end_that_is_not_allowed_is_detected(attack, run, monkeypatch, error, result):
    def plant(*_, **__):
        raise error

    monkeypatch.setattr(ledger_open, "beginning", plant)
    assert result in attack("compare", "run", "other", allowed=(2,))


def test_a_command_that_waits_is_detected(attack, run, monkeypatch):
    monkeypatch.setattr(ledger_open, "beginning", lambda file: time.sleep(60))
    assert attack("compare", "run", "other", seconds=0.2) == "it hangs"
