# SPDX-License-Identifier: Apache-2.0
"""The one wrapper of `optimizer.step`: its order, and that it is there for the length of a training only."""

import importlib.util
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest

import tp_invariant_recipes.observe


@pytest.fixture
def seam(monkeypatch):
    """The module, of which Bridge's part, an empty class, is ours: importing Bridge takes 10 s and more."""
    callbacks = ModuleType("megatron.bridge.training.callbacks")
    callbacks.Callback, callbacks.CallbackContext = type("Callback", (), {}), object
    monkeypatch.setitem(sys.modules, callbacks.__name__, callbacks)
    file = f"{tp_invariant_recipes.observe.__path__[0]}/optimizer_step.py"
    spec = importlib.util.spec_from_file_location("optimizer_step_without_bridge", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Optimizer:
    def __init__(self, seen):
        self.seen = seen

    def step(self, *args, **kwargs):
        self.seen.append(("step", args, kwargs))
        return True, 1.5, 0


@pytest.fixture
def seen():
    """What happened, in order."""
    return []


@pytest.fixture
def training(seam, seen):
    """An optimizer whose training has begun, with subscribers "first" and "last", and a callback that is none."""

    class Subscriber(seam.AroundOptimizerStep):
        def __init__(self, name):
            self.name = name

        @contextmanager
        def around_optimizer_step(self):
            seen.append(f"before {self.name}")
            yield
            seen.append(f"after {self.name}")

    steps = seam.OptimizerStep([Subscriber("first"), object(), Subscriber("last")])
    optimizer = Optimizer(seen)
    steps.on_train_start(SimpleNamespace(optimizer=optimizer))
    return steps, optimizer


def test_subscribers_come_in_reverse_before_the_step_and_in_order_after_it(training, seen):
    _, optimizer = training
    assert optimizer.step("argument", key=1) == (True, 1.5, 0)
    step = ("step", ("argument",), {"key": 1})
    once = ["before last", "before first", step, "after first", "after last"]
    assert seen == once
    optimizer.step("argument", key=1)
    assert seen == once * 2


def test_after_the_training_the_optimizer_has_its_own_step(training, seen):
    steps, optimizer = training
    steps.restore()
    steps.restore()
    assert "step" not in vars(optimizer)
    optimizer.step()
    assert seen == [("step", (), {})]


def test_what_a_subscriber_raises_keeps_the_step_from_happening(seam, seen):
    class Refuses(seam.AroundOptimizerStep):
        def around_optimizer_step(self):
            raise ValueError("moved in memory")

    optimizer = Optimizer(seen)
    seam.OptimizerStep([Refuses()]).on_train_start(SimpleNamespace(optimizer=optimizer))
    with pytest.raises(ValueError, match="moved in memory"):
        optimizer.step()
    assert seen == []
