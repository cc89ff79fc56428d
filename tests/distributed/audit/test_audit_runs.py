# SPDX-License-Identifier: Apache-2.0
"""`tpi audit`, end to end on CPU ranks: what it leaves, pairs of trainings, recordings, and what ends it."""

import json
import re
import signal

import pytest

from tests.distributed.faults import has_lines, stop
from tp_invariant_recipes.features.audit.campaign import _write_texts

pytestmark = pytest.mark.release  # in `make test`: test_audit_bugs.py
SMALL = ("qwen3_toy", "model.num_layers=1", "seq=32", "gbs=2", "device=cpu")


def audit_result(shared, directory: str) -> dict:
    return json.loads((shared.folder / directory / "audit.json").read_text())


def test_the_same_arithmetic_is_equal_and_leaves_two_files(shared):
    repeated = ("--against", "model.recompute_granularity=selective", "iters=2")
    done = shared("audit", *SMALL, *repeated, "--dir", "same", status=0)
    assert re.search("within rounding: .* of steps 1 to 2", done.stdout)
    remaining = ["audit.json", "index-cache", "write.lock"]
    assert sorted(p.name for p in (shared.folder / "same").iterdir()) == remaining
    result = audit_result(shared, "same")
    assert {tensor["factor"] for tensor in result["tensors"]} == {0.0}
    assert {tensor["step"] for tensor in result["tensors"]} == {1, 2}
    assert result["reference"] == ["model.recompute_granularity=selective"]


def test_another_model_is_beyond_rounding_and_its_runs_stay(shared):
    done = shared("audit", *SMALL, "--against", "model.rotary_base=100", "--dir", "other", status=1)
    assert "beyond rounding: the output of rotary_pos_emb" in done.stdout
    assert {"audited", "reference"} <= {p.name for p in (shared.folder / "other").iterdir()}


def test_a_training_that_fails_is_no_answer(shared):
    def plant() -> None:
        from tp_invariant_recipes.features.audit import recording

        def missing(model):
            raise RuntimeError("planted")

        recording._shards = missing

    done = shared("audit", *SMALL, "tp=2", "--dir", "failed", before=plant, status=2)
    assert "the training audited failed, so that nothing can be compared" in done.stderr
    assert "planted" in done.stderr
    assert not (shared.folder / "failed" / "audit.json").exists()


@pytest.mark.parametrize("number, status", ((signal.SIGINT, 130), (signal.SIGTERM, 2)))
def test_a_stopped_audit_says_so(tpi, number, status):
    process = tpi.start("audit", *SMALL, "tp=2", "iters=400", "--dir", "stopped")
    ledger = tpi.folder / "stopped/audited/ledger.jsonl"
    stop(process, has_lines(ledger, 2), number, status)
    assert "the audit was stopped before its end, in the training audited: stopped/audited" in process.stderr
    attempt = json.loads((tpi.folder / "stopped/audited/run.json").read_text())["attempts"][-1]
    assert attempt["outcome"] == "stopped"


def recording(folder: str, dither: int | None = None, *, wrong: bool = False):
    """Have Bridge's step recorded as a program with a loop of its own would do it."""

    def plant() -> None:
        from megatron.bridge.training import train

        from tests.distributed import audit_bugs
        from tp_invariant_recipes import recordings

        step = train.train_step

        def recorded(forward, data, model, optimizer, *args, **more):
            with recordings.record(model, optimizer, folder, sequence=32, batch=2, dither=dither):
                return step(forward, data, model, optimizer, *args, **more)

        train.train_step = recorded
        if wrong:
            audit_bugs.outputs_averaged()

    return plant


def test_a_program_records_its_own_step_and_the_command_judges(shared):
    words = ("train", *SMALL, "iters=1", "ledger.digests=0", "numerics=stock", "numerics.initial_weights=invariant")
    for dither in (None, 1, 2, 3):
        shared(*words, f"run.dir=runs/{dither}", before=recording("tp1", dither), status=0)
    for name, wrong in (("tp2", False), ("wrong", True)):
        plant = recording(name, wrong=wrong)
        shared(*words, "tp=2", f"run.dir=runs/{name}", before=plant, status=0)
    shared("audit", "--recorded", "tp2", "tp1", "--dir", "right", status=0)
    done = shared("audit", "--recorded", "wrong", "tp1", "--dir", "judged", status=1)
    assert "the output of decoder.layers.0.self_attention.linear_proj" in done.stdout
    assert {tensor["kind"] for tensor in audit_result(shared, "right")["tensors"]} == {
        "weights", "forward", "backward", "gradients", "norm", "updates",
    }  # fmt: skip


def test_without_its_patch_the_norm_has_the_sinks_of_one_rank(shared):
    sinks = ("qwen3_toy", "model.num_layers=1", "seq=8", "gbs=4", "device=cpu", "tp=2", "model.softmax_type=learnable")
    large = (*sinks, "model.init_method_std=0.2")  # with Megatron's 0.02 they are a millionth of the norm
    done = shared("audit", *large, "patches.off=[core-sinks-norm]", "--dir", "sinks-off", status=1)
    assert "softmax_offset it counts the part of one rank alone" in done.stdout
    assert "patch core-sinks-norm mends it" in done.stdout
    assert "within rounding" in shared("audit", *large, "--dir", "sinks", status=0).stdout


@pytest.mark.parametrize("off, arrives", (("patches.off=[bridge-mtp-mask]", False), ("patches.off=[]", True)))
def test_a_mask_of_the_loss_reaches_multi_token_prediction_with_the_patch_alone(shared, off, arrives):
    texts = shared.folder / "texts"
    _write_texts(texts)
    data = ("data=text", f"data.path={texts}", "data.tokenizer=byte", "dataset.split='90,5,5'")
    masked = ("--against", "dataset.eod_mask_loss=true", "--dir", f"masks-{arrives}")
    shared("audit", *SMALL, "model.mtp_num_layers=1", *data, off, *masked, status=1)
    result = audit_result(shared, f"masks-{arrives}")
    factors = {t["factor"] for t in result["tensors"] if t["name"].startswith("gradients/mtp.")}
    assert min(factors) > 4 if arrives else factors == {0.0}
