"""Calls in processes of their own: what they return, what a defect, a kill and a stop do."""

import os
import signal
import time

import pytest

from tp_invariant_recipes.errors import Interrupted, RunError
from tp_invariant_recipes.features.audit.trial import SideBySide
from tp_invariant_recipes.launch.ranks import Stop


@pytest.mark.usefixtures("here")
def test_calls_run_at_the_same_time_and_each_returns_its_own():
    def met(own: str, other: str) -> tuple[str, int]:
        open(own, "w").close()
        until = time.monotonic() + 30
        while not os.path.exists(other):
            assert time.monotonic() < until
            time.sleep(0.01)
        return own, os.getpid()

    calls = SideBySide(Stop())
    calls.start("a", lambda: met("a", "b"))
    calls.start("b", lambda: met("b", "a"))
    assert calls.keys == ["a", "b"]
    ended = dict(calls.next() for _ in range(2))
    assert {key: own for key, (own, _) in ended.items()} == {"a": "a", "b": "b"}
    assert len({os.getpid(), *(process for _, process in ended.values())}) == 3
    assert not len(calls)


@pytest.mark.parametrize("number, words", ((None, "ZeroDivisionError"), (signal.SIGKILL, "was killed")))
def test_a_defect_or_a_kill_ends_the_others_and_is_an_error(number, words):
    calls = SideBySide(Stop())
    calls.start("long", lambda: time.sleep(60))
    calls.start("wrong", lambda: 1 // 0 if number is None else os.kill(os.getpid(), number))
    with pytest.raises(RunError, match=words):
        calls.next()
    assert not len(calls)


@pytest.mark.parametrize("stops", (lambda: time.sleep(60), lambda: (_ for _ in ()).throw(Interrupted)))
def test_a_stop_is_passed_on_and_ends_all(stops):
    stop = Stop(requests=1)
    calls = SideBySide(stop)
    calls.start("a", stops)
    calls.start("b", stops)
    with pytest.raises(Interrupted):
        calls.next()
    assert not len(calls)
