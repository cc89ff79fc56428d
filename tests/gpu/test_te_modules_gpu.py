# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's own modules on GPUs: with the switch one result for tp=1, 2, 4, without it several.

The ranks of all degrees run side by side where there are GPUs enough. With the switch, ranks can share a GPU in pairs:
Gloo then moves the bytes, since NCCL takes one rank a GPU. One GPU has tp=1 and 2.
"""

import os
import pickle
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import torch

from tests import te_cases
from tests.distributed.ranks import unequal
from tp_invariant_recipes.settings.environment import settings

pytestmark = pytest.mark.gpu
DEGREES = (1, 2, 4)
PORTS = count(29_571)


def start(folder: Path, switch: str, size: int, gpus: range) -> list[subprocess.Popen]:
    """The ranks of one degree, on these GPUs."""
    backend = "nccl" if size == len(gpus) else "gloo"
    common = os.environ | settings("gpu", os.environ) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(next(PORTS))}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.te_cases", str(folder), switch, backend],
            env=common | {"WORLD_SIZE": str(size), "RANK": str(rank), "LOCAL_RANK": str(gpus[rank % len(gpus)])},
            cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(switch, tp) → case → tensors of the whole, for every tp that there are GPUs for."""
    pytest.importorskip("transformer_engine.pytorch")
    folder, there = tmp_path_factory.mktemp("te"), torch.cuda.device_count()
    waiting = [("1", size) for size in DEGREES if size <= 2 * there] + [
        ("0", size) for size in DEGREES if size <= there
    ]
    whole = {}
    while waiting:
        first, going = 0, []
        for switch, size in list(waiting):
            taken = min(size, there)
            if first + taken <= there:
                waiting.remove((switch, size))
                going.append((switch, size, start(folder, switch, size, range(first, first + taken))))
                first += taken
        for switch, size, ranks in going:
            errors = [rank.communicate()[1] for rank in ranks]
            assert all(rank.returncode == 0 for rank in ranks), "\n".join(error[-2000:] for error in errors)
            held = [pickle.loads((folder / f"{switch}-{size}-{rank}.pickle").read_bytes()) for rank in range(size)]
            actual = te_cases.whole(held)
            cases = (*te_cases.CASES, *te_cases.UNSPLIT)
            whole[switch, size] = {case: actual[str(case)] for case in cases if str(case) in actual}
    return whole


@pytest.mark.parametrize("tp", DEGREES)
@pytest.mark.parametrize("case", te_cases.CASES, ids=str)
def test_every_tp_has_one_result_that_is_near_to_stocks(results, case, tp):
    """That of a module without parallel_mode, which Transformer Engine's own test of invariance compares with."""
    if ("1", tp) not in results:
        pytest.skip(f"tp={tp} needs {tp} GPUs")
    single = results["1", 1]
    assert unequal(single[case], results["1", tp][case]) == []
    assert te_cases.unlike_unsplit(single, results["1", tp], case) == []
    te_cases.assert_near(single[case], results["0", 1][case], case)


@pytest.mark.parametrize("tp", DEGREES[1:])
@pytest.mark.parametrize("case", te_cases.CASES, ids=str)
def test_switched_off_it_has_several(results, case, tp):
    if ("0", tp) not in results:
        pytest.skip(f"tp={tp} needs {tp} GPUs")
    summed = "output" if case.mode == "row" else "input gradient"
    assert summed in unequal(results["0", 1][case], results["0", tp][case])
