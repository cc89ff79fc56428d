"""The simulations of many ranks and many nodes, at a small size.

Those of ranks have assertions of their own, which fail if a part is lost or the sums miss it.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

SCRIPTS = Path(__file__).parents[3] / "scripts" / "scale"


@pytest.fixture
def ranks(monkeypatch):
    """The script's functions, for a model of 16 layers with 64 experts."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    result = runpy.run_path(str(SCRIPTS / "ranks"))
    monkeypatch.setattr(result["deepseek"], "LAYERS", 16)
    monkeypatch.setattr(result["deepseek"], "EXPERTS", 64)
    monkeypatch.setattr(torch.cuda, "Event", MagicMock())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield result
    dist.destroy_process_group()
    sys.modules.pop("deepseek")


def test_sums_of_1024_ranks_cover_every_tensor_and_miss_a_lost_part(ranks, capsys):
    ranks["simulate"]("masters", ranks["masters"], 1024)
    output = capsys.readouterr().out
    assert "tensors are covered by" in output
    assert "without one part, one tensor is not" in output


@pytest.mark.release  # half a minute, most of it imports of three processes
def test_a_node_that_falls_silent_is_noticed_and_the_others_end():
    few = ["--nodes", "3", "--processes", "1", "--seconds", "1", "--lose", "1", "--lost", "2"]
    command = [sys.executable, str(SCRIPTS / "nodes"), *few, "--job", str(os.getpid())]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert "2 of 2 nodes joined" in output
    assert "n1 of n[0-2] has given no sign of life for 2 s" in output
    assert "1 of the others had ended" in output
