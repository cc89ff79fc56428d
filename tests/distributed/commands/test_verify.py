# SPDX-License-Identifier: Apache-2.0
"""`tpi verify` and `tpi certify`, end to end on CPU ranks."""

import json
import os
import signal
import zipfile

import pytest

from tests.distributed.faults import at_step, reached, stop, wait_for_sigterm

SMALL = ("qwen3_toy", "model.num_layers=1", "seq=32", "gbs=1", "iters=2")


@pytest.fixture(scope="module")
def tree(shared):
    """A matrix of two layouts that agree."""
    return shared("verify", *SMALL, "tp=1,2", "numerics=tree", "--dir", "tree", status=0)


def rows(stdout: str) -> list[list[str]]:
    """The configurations of the table, without its head. In a pipe it has no rules, and nothing else is indented."""
    return [line.split() for line in stdout.splitlines()[1:] if line.startswith(" ")]


def test_tree_numerics_are_identical_and_the_table_names_each_cell(tree, shared):
    first, second = rows(tree.stdout)
    assert (first[:3], first[4:]) == (["tp=1", "1", "2"], ["reference"])
    assert (second[:3], second[4:]) == (["tp=2", "2", "2"], ["identical"])
    assert first[3] == second[3]
    line = "identical: tp=1, 2 are bitwise identical over 2 steps (loss, gradient norm, learning rate, gradients"
    assert line in tree.stdout
    assert "1 of 2: tp=1 on 1 cpu rank, 2 steps" in tree.stderr
    assert "2 of 2: tp=2 on 2 cpu ranks, 2 steps" in tree.stderr
    assert "Traceback" not in tree.stderr
    assert shared("compare", "tree/tp1", "tree/tp2").status == 0
    result = json.loads((shared.folder / "tree" / "verify.json").read_text())
    assert (result["verdict"], result["exit_status"], result["model"]) == ("identical", 0, "qwen3_toy")
    assert result["rows"][1]["comparison"]["coverage"]["masters"]["both"] == 2


def test_the_runs_can_be_rejudged_without_training(tree, shared):
    before = (shared.folder / "tree" / "verify.json").read_bytes()
    judged = shared("verify", "--recheck", "tree")
    assert (judged.status, judged.stdout) == (0, tree.stdout)
    assert (shared.folder / "tree" / "verify.json").read_bytes() == before


def test_stock_numerics_differ_and_say_what_to_do(shared):
    stock = ("numerics=stock", "numerics.initial_weights=invariant")
    done = shared("verify", *SMALL, "tp=1,2", *stock, "--dir", "stock", status=1)
    assert rows(done.stdout)[1][4:] == ["different", "at", "step", "1:", "loss"]
    assert "different: tp=2 is not bitwise identical to tp=1 at step 1: loss " in done.stdout
    assert "docs/audit.md tells rounding from a fault" in " ".join(done.stdout.split())
    assert "continue with: tpi bisect stock/tp1 stock/tp2" in done.stdout


LONGER = (*SMALL, "numerics=tree", "iters=6", "tp=1,2", "--dir", "m")


def _stop_in(tpi, tp: int, number: signal.Signals, status: int):
    """Verify, and send a signal while the cell of this tp trains; no rank is left."""
    process = tpi.start("verify", *LONGER, before=at_step(3, wait_for_sigterm, world=tp))
    ranks = stop(process, reached(tpi.folder, 3), number, status)
    assert len(ranks) >= tp  # those of the cell before may wait for another run
    return process.stdout


@pytest.mark.release
def test_ctrl_c_in_the_last_cell_says_what_was_done_and_it_can_be_completed(tpi):
    message = _stop_in(tpi, 2, signal.SIGINT, 130)
    first, second = rows(message)
    assert (first[0], first[-1]) == ("tp=1", "reference")
    assert "stopped:" in second
    assert "incomplete: tp=2 was stopped" in message
    assert "tpi train --resume m/tp2" in message
    assert "continue with: tpi verify --last-failed --dir m" in message
    completed = tpi("verify", "--last-failed", "--dir", "m", status=0)
    assert "1 of 1: tp=2 on 2 cpu ranks, 6 steps" in completed.stderr
    assert "identical: tp=1, 2 are bitwise identical over 6 steps" in completed.stdout
    attempts = json.loads((tpi.folder / "m" / "tp2" / "run.json").read_text())["attempts"]
    assert [attempt["from_step"] for attempt in attempts] == [0, 3]


def test_what_bridge_refuses_in_a_cell_is_reported_before_anything_starts(tpi):
    refused = tpi("verify", *SMALL, "tp=1,2", "model.recompute_granularity=full", "--dir", "m")
    assert (refused.status, refused.stdout) == (2, "")
    assert "Megatron-Bridge refuses this configuration" in refused.stderr
    assert not (tpi.folder / "m").exists()


def _with_a_secret() -> None:
    os.environ |= {"MY_PASSWORD": "hunter-2", "NCCL_TOKEN": "hunter-3", "HOME_SWEET": "hunter-4", "NCCL_NTHREADS": "64"}


@pytest.mark.release
def test_a_certificate_holds_of_the_environment_what_numerics_depend_on_and_no_secret(tpi):
    leaking = tpi(
        "train", *SMALL, "tp=1", "run.dir=other", "data.json_key=${oc.env:MY_PASSWORD}", before=_with_a_secret
    )
    assert leaking.status == 2
    forwarded = "cluster.forward=[MY_PASSWORD]"
    tpi("train", *SMALL, "tp=1", "run.dir=run", forwarded, before=_with_a_secret, status=0)
    assert not [file for file in tpi.folder.rglob("*") if file.is_file() and b"hunter" in file.read_bytes()]
    assert tpi("certify", "run").status == 0
    with zipfile.ZipFile(tpi.folder / "run.tpicert") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    environment = json.loads(members["environment.json"])
    assert environment["NCCL_NTHREADS"] == "64"
    assert {"NCCL_TOKEN", "MY_PASSWORD", "HOME_SWEET"}.isdisjoint(environment)
    assert not any(b"hunter" in data for data in members.values())
    assert tpi("certify", "--check", "run.tpicert").status == 0
