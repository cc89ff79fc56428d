"""A rank's beginning."""

import os
import sys

import pytest

from tp_invariant_recipes.training import rank


class Closed:
    """A gate that nobody opens."""

    def wait(self) -> None:
        raise TimeoutError


def test_a_rank_does_nothing_before_all_have_started(monkeypatch, tmp_path):
    """One that met the launcher's store while others are forked could leave them a lock that nobody unlocks."""
    monkeypatch.setattr(rank, "_die_with_launcher", lambda: None)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    rank_info = rank.RankInfo(0, 0, 1, 1, "127.0.0.1", (1,))
    with pytest.raises(TimeoutError):
        rank.main(0, str(tmp_path), [rank_info], lambda *_: sys.exit("started"), Closed(), None)
    assert "MASTER_PORT" not in os.environ
    assert list(tmp_path.iterdir()) == []
