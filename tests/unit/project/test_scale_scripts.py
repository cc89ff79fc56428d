# SPDX-License-Identifier: Apache-2.0
"""The simulations of many ranks and many nodes, at a small size.

Those of ranks have assertions of their own, which fail if a part is lost or the sums miss it.
"""

import runpy
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
