"""Where the seconds until the first step go."""

import os
import time

import pytest

from tp_invariant_recipes.numerics.products import cublas
from tp_invariant_recipes.start import bridge, cache
from tp_invariant_recipes.start.cache import IMPORTS, KERNELS, StartClock


@pytest.fixture
def clock(monkeypatch):
    """A clock whose time passes as a test says. returns: the clock, and what passes a number of seconds."""
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    made = StartClock(began=1000.0)
    for module in (bridge, cublas, cache):
        monkeypatch.setattr(module, "CLOCK", made)
    return made, wait


def test_the_parts_add_up(clock):
    made, wait = clock
    wait(2)
    with made.counted(IMPORTS):
        wait(10)
    made.setting_up = time.time()
    with made.counted(KERNELS):
        wait(1)
    wait(3)
    made.step_begins()
    with made.counted(KERNELS), made.counted(KERNELS):  # a kernel that is compiled for a trial
        wait(4)
    wait(5)
    parts = made.parts()
    assert parts == {"composing": 2, IMPORTS: 10, "model and data": 3, KERNELS: 5, "step": 5}
    line = "first step after 25.0 s: composing 2.0, imports 10.0, model and data 3.0, kernels and trials 5.0, step 5.0"
    assert cache.text(parts) == line


def test_an_unknown_part_is_not_shown():
    assert cache.text({"step": 1.0, "\x1b[2J": 9.0}) == "first step after 1.0 s: step 1.0"


def test_the_process_began_before_now_and_after_its_parent():
    began = cache.process_start()
    pid = os.fork()
    if pid == 0:
        later = cache.process_start() >= began - 0.02
        os._exit(0 if later else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert 0 < time.time() - began < 24 * 3600
