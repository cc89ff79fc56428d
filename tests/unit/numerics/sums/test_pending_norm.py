"""Megatron's step collects the gradients to clip before it waits for the norm, and its caller gets a number."""

import math
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import ChainedOptimizer

from tp_invariant_recipes.numerics.sums.grad_norm import PendingNorm, pending, reading_late

CLIP = 1.0
ORIGINAL = ChainedOptimizer.step


class Step:
    """Megatron's own step and clipping of one optimizer with two parameters, and what happens in them."""

    def __init__(self, monkeypatch, norm, skip_above=math.inf):
        self.happened, self.norm = [], norm
        config = SimpleNamespace(
            clip_grad=CLIP,
            grad_norm_skip_threshold=skip_above,
            use_precision_aware_optimizer=False,
            use_precision_aware_optimizer_no_fp8_or_ds_fp8=False,
            log_num_zeros_in_grad=False,
        )
        parameter = SimpleNamespace(grad=SimpleNamespace(type=lambda: "torch.cuda.FloatTensor", detach=self.collect))
        single = SimpleNamespace(config=config, get_parameters=lambda: [parameter, parameter])
        self.optimizer = SimpleNamespace(
            chained_optimizers=[single],
            config=config,
            prepare_grads=lambda: False,
            get_grad_norm=lambda: pending(self.read),
            _compute_grad_norms_by_group=lambda: None,
            step_with_ready_grads=self.update,
        )
        monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)  # no GPU is here
        monkeypatch.setattr(clip_grads, "multi_tensor_applier", self.scale)

    def collect(self):
        self.happened.append("collected")

    def read(self):
        self.happened.append("read")
        return self.norm

    def scale(self, function, overflow, grads, coefficient):
        self.happened.append(("scaled", coefficient))

    def update(self):
        self.happened.append("updated")
        return True


def test_the_gradients_are_collected_before_the_norm_is_read(monkeypatch):
    step = Step(monkeypatch, 4.0)
    result = reading_late(ORIGINAL)(step.optimizer)
    assert step.happened == ["collected", "collected", "read", ("scaled", CLIP / (4.0 + 1.0e-6)), "updated"]
    assert result == (True, 4.0, None)
    assert type(result[1]) is float


def test_megatron_alone_waits_first(monkeypatch):
    """The control, with the same coefficient."""
    step = Step(monkeypatch, 4.0)
    assert ORIGINAL(step.optimizer) == (True, 4.0, None)
    assert step.happened == ["read", "collected", "collected", ("scaled", CLIP / (4.0 + 1.0e-6)), "updated"]


@pytest.mark.parametrize("norm, updated", ((2.0, False), (0.5, True)))
def test_a_norm_is_compared_with_the_threshold(monkeypatch, norm, updated):
    step = Step(monkeypatch, norm, skip_above=1.0)
    assert reading_late(ORIGINAL)(step.optimizer)[0] is updated
    assert ("updated" in step.happened) is updated
    assert step.happened.count("read") == 1


def test_a_norm_that_nothing_used_is_a_number_afterwards(monkeypatch):
    step = Step(monkeypatch, 4.0)
    step.optimizer.config.clip_grad = 0.0
    assert reading_late(ORIGINAL)(step.optimizer)[1] == 4.0
    assert step.happened == ["updated", "read"]


def test_a_skipped_step_has_none(monkeypatch):
    step = Step(monkeypatch, 4.0)
    step.optimizer.prepare_grads = lambda: True
    assert reading_late(ORIGINAL)(step.optimizer) == (False, None, None)
    assert step.happened == []


def test_outside_of_a_step_the_norm_is_a_number(monkeypatch):
    """After a step that failed, too."""
    step = Step(monkeypatch, 4.0)
    step.optimizer.step_with_ready_grads = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        reading_late(ORIGINAL)(step.optimizer)
    assert type(pending(lambda: 2.5)) is float


def test_it_is_written_as_its_number():
    assert f"{PendingNorm(lambda: 2.5)}" == "2.5"
