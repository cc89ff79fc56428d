"""`tpi compare` on real runs: digests of equal runs, a planted fault, and their logs."""

import json

import pytest

pytestmark = pytest.mark.release  # in `make test`: tests/unit/compare/, and every test that compares runs

TRAIN = ("train", "qwen3_toy", "model.num_layers=1", "seq=32", "gbs=2", "iters=3", "numerics=tree")


def _another_weight() -> None:
    """In the second step the optimizer writes another final norm, on every rank."""
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

    original = MixedPrecisionOptimizer.step_with_ready_grads
    calls = []

    def step(self):
        done = original(self)
        calls.append(1)
        if len(calls) == 2:
            norm = [p for group in self.float16_groups for p in group if p.dim() == 1][-1]
            norm.main_param.data[5] += 0.5
            norm.data.copy_(norm.main_param)
        return done

    MixedPrecisionOptimizer.step_with_ready_grads = step


@pytest.fixture(scope="module")
def runs(shared):
    """tp1 and tp2 agree; `planted` has a fault in its second step."""
    for name, layout, before in (("tp1", "tp=1", None), ("tp2", "tp=2", None), ("planted", "tp=2", _another_weight)):
        shared(*TRAIN, layout, f"run.dir={name}", before=before, status=0)
    return shared


def test_layouts_agree_in_every_gradient_and_weight(runs):
    compared = runs("compare", "tp1", "tp2", status=0)
    assert (
        ", learning rate, gradients and master weights of 10 parameters and clipped gradients and optimizer moments of "
        "10 parameters (at step 3) equal bit for bit"
    ) in compared.stdout


def test_a_planted_fault_is_named(runs):
    compared = runs("compare", "tp1", "planted", "--json", status=1)
    [result] = json.loads(compared.stdout)["comparisons"]
    first = result["first_difference"]
    assert (first["step"], first["kind"], first["phase"]) == (2, "masters", "update")
    assert first["name"].startswith("masters/decoder.")
    assert "norm" in first["name"]
    assert first["inputs_matched"] is True
    assert [p["name"] for p in result["parameters"] if p["steps"][0] == 2] == [first["name"].removeprefix("masters/")]
    assert result["steps_differing"] == 2
