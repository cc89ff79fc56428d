"""`tpi audit`, end to end on CPU ranks: a fault in the gradients of one kind of parameter is found and named."""

import json
import math
import os
import signal

import pytest

from tests.distributed.faults import lives, ranks_of
from tp_invariant_recipes.ledger.bits import bits_float

SMALL = ("qwen3_toy", "model.num_layers=1", "seq=32", "gbs=4", "device=cpu", "--steps", "2")
AGAIN = ("--against", "model.recompute_granularity=selective")  # the same products, computed twice
FC2 = "decoder.layers.0.mlp.linear_fc2.weight"


def losing_micro_batches() -> None:
    """As NVIDIA/TransformerEngine#3051: in the second training, of one matrix the last micro-batch alone is left."""
    from tp_invariant_recipes.training import gradient_norms

    start = gradient_norms.GradientNorms.on_train_start

    def on_train_start(self, context) -> None:
        start(self, context)
        if context.state.cfg.model.recompute_granularity:
            parameter = dict(gradient_norms.unwrapped(context.model[0]).named_parameters())[FC2]

            def forget(_) -> None:
                parameter.main_grad.zero_()

            parameter.register_hook(forget)

    gradient_norms.GradientNorms.on_train_start = on_train_start


def found(shared, directory: str) -> dict:
    return json.loads((shared.folder / directory / "audit.json").read_text())


def test_the_same_gradients_pass_bit_for_bit_and_leave_one_file(shared):
    done = shared("audit", *SMALL, *AGAIN, "--dir", "same", status=0)
    assert "same: gradient norms of first and second are equal bit for bit over steps 1 to 2" in done.stdout
    assert sorted(p.name for p in (shared.folder / "same").iterdir()) == ["audit.json", "index-cache", "write.lock"]
    groups = {group["name"]: group for group in found(shared, "same")["groups"]}
    assert list(groups) == ["attention", "dense MLP", "embedding", "norms"]
    assert {group["state"] for group in groups.values()} == {"equal"}
    assert all(group["first"] == group["second"] > 0 and group["worst"]["allowed"] is None for group in groups.values())


def test_micro_batches_that_are_lost_are_found_and_named(shared):
    done = shared("audit", *SMALL, *AGAIN, "--dir", "lost", before=losing_micro_batches, status=1)
    result = found(shared, "lost")
    different = {one["name"]: one for one in result["groups"] if one["state"] == "different"}
    worst = different["dense MLP"]["worst"]
    assert worst["name"] == FC2
    assert worst["ratio"] < 0.8
    assert result["verdict"] == "different"
    assert f"dense MLP, furthest: {FC2} at step {worst['step']}" in done.stdout
    assert {"first", "second", "rounded", "audit.json"} <= {p.name for p in (shared.folder / "lost").iterdir()}
    # Summed over micro-batches, not yet clipped: together they are the norm that Megatron clips by.
    for step, line in zip(
        shared.ledger("lost/first"), (shared.folder / "lost/first/audit/norms.jsonl").open(), strict=True
    ):
        together = math.hypot(*json.loads(line)["norms"].values())
        assert together == pytest.approx(bits_float(step.grad_norm), rel=1e-5)
        assert together > 1.0  # clip_grad


@pytest.mark.release
def test_another_order_of_additions_is_rounding_over_two_ranks(shared):
    weights = "numerics.initial_weights=invariant"
    done = shared("audit", *SMALL, weights, "--against", "tp=2", "--dir", "tp", "--json", status=0)
    result = json.loads(done.stdout)
    assert result == found(shared, "tp")
    assert "rounding" in {group["state"] for group in result["groups"]}
    assert all(0 < group["worst"]["allowed"] < 0.4 for group in result["groups"])
    assert result["pair"]["of_second"] == ["tp=2"]


@pytest.mark.release
def test_a_training_that_fails_is_no_answer(shared):
    def plant() -> None:
        from tp_invariant_recipes.training import gradient_norms

        def missing(held):
            raise RuntimeError("planted")

        gradient_norms._parts = missing

    done = shared("audit", *SMALL, *AGAIN, "--dir", "failed", before=plant, status=2)
    assert "the training first failed, so that nothing can be compared" in done.stderr
    assert "planted" in done.stderr
    assert not (shared.folder / "failed" / "audit.json").exists()


@pytest.mark.release
@pytest.mark.parametrize("number, status", ((signal.SIGINT, 130), (signal.SIGTERM, 2)))
def test_a_stopped_audit_says_so(tpi, number, status):
    process = tpi.start("audit", *SMALL[:-1], "400", *AGAIN, "--dir", "stopped")
    ledger = tpi.folder / "stopped/first/ledger.jsonl"
    process.until(lambda: ledger.exists() and ledger.read_bytes().count(b"\n") > 2)
    ranks = ranks_of(process.pid)
    os.kill(process.pid, number)
    assert process.wait() == status
    assert not any(map(lives, ranks))
    assert "the audit was stopped before its end, in the training first: stopped/first" in process.stderr
    attempt = json.loads((tpi.folder / "stopped/first/run.json").read_text())["attempts"][-1]
    assert attempt["outcome"] == "stopped"
