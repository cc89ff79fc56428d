# SPDX-License-Identifier: Apache-2.0
"""The files of a guard: evidence, read whole or refused; what is not trusted, settled once; the exclusion of nodes."""

import math

import pytest
import torch

from tp_invariant_recipes.errors import CheckpointError
from tp_invariant_recipes.ledger import evidence
from tp_invariant_recipes.ledger.evidence import Evidence, Suspect
from tp_invariant_recipes.runs import checkpoints
from tp_invariant_recipes.runs.checkpoints import Untrusted
from tp_invariant_recipes.runs.run_dir import RunDir

EVIDENCE = Evidence(
    detector=evidence.PRODUCT,
    step=12,
    where="forward pass of decoder.layers.0.mlp.linear_fc2",
    suspects=(Suspect(1, "n2", "a GPU", "GPU-5", "1654"),),
    judge="the product's definition",
    outputs=2,
    of_=256,
    bits=3,
    trusted=10,
    numerics="tree",
)
DATA = {"a": torch.randn(3, 2).bfloat16().t(), "out": torch.tensor([1.0, math.nan])}


def saved(run_dir, *steps):
    for step in steps:
        folder = checkpoints.iteration_dir(run_dir.checkpoints, step)
        folder.mkdir(parents=True)
        checkpoints.write_manifest(folder, step, "0" * 64, {}, "distributed")


def test_evidence_is_read_as_written(tmp_path):
    file = tmp_path / "guard" / "x.evidence"
    evidence.write(file, EVIDENCE, DATA)
    result, tensors = evidence.read(file)
    assert result == EVIDENCE
    assert tensors.keys() == DATA.keys()
    assert all(torch.equal(tensors[name], DATA[name]) for name in ("a",))
    assert tensors["out"].view(torch.int32).equal(DATA["out"].view(torch.int32))
    assert result.text().splitlines() == [
        "silent data corruption at step 12: forward pass of decoder.layers.0.mlp.linear_fc2: 3 bits of 2 of "
        "256 outputs wrong",
        "rank 1 on n2, a GPU, UUID GPU-5, serial number 1654",
        "judged by the product's definition",
    ]


def test_checkpoints_after_the_trusted_step_are_set_aside_once(tmp_path):
    run_dir = RunDir(tmp_path)
    saved(run_dir, 5, 10, 15, 20)
    assert checkpoints.settle(run_dir) is None
    checkpoints.distrust(run_dir, Untrusted(10, ("n1", "n2")))
    assert checkpoints.settle(run_dir) == Untrusted(10, ("n1", "n2"))
    assert [item.step for item in checkpoints.finished(run_dir.checkpoints)] == [5, 10]
    saved(run_dir, 15)
    assert checkpoints.settle(run_dir) is None
    assert [item.step for item in checkpoints.finished(run_dir.checkpoints)] == [5, 10, 15]


def test_a_note_that_cannot_be_read_is_no_trust(tmp_path):
    run_dir = RunDir(tmp_path)
    checkpoints.distrust(run_dir, Untrusted(15))
    (tmp_path / "guard" / checkpoints.UNTRUSTED).write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoints.settle(run_dir)


def test_the_last_good_step_is_of_this_run_so_far(tmp_path):
    run_dir = RunDir(tmp_path)
    assert checkpoints.read_good(run_dir, 100) == 0
    checkpoints.write_good(run_dir, 60)
    assert [checkpoints.read_good(run_dir, start) for start in (59, 60, 100)] == [0, 60, 60]
