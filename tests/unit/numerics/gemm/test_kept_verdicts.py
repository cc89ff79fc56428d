# SPDX-License-Identifier: Apache-2.0
"""What exactness checks have found is kept for a GPU and its software; a later process does not check again."""

from types import SimpleNamespace

import pytest
import torch

from tp_invariant_recipes.numerics.gemm import cublas

OPERAND = SimpleNamespace(is_cuda=True, get_device=lambda: 0)
KIND = (torch.Size([2, 3]), torch.bfloat16, False)


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Have a process start: it returns a function that asks for a verdict, and the list of the trials."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cublas, "capturing", lambda operand: False)

    def of(state, name="GEMM", found=True, kept=cublas.Verdicts):
        monkeypatch.setattr(cublas, "_state", lambda device: (state, device))
        cublas._kept.cache_clear()
        decided, trials = kept(name) if kept else {}, []

        def ask(kind=KIND):
            return cublas.tried(decided, kind, OPERAND, lambda: trials.append(kind) or found)

        return ask, trials

    yield of
    cublas._kept.cache_clear()


@pytest.mark.parametrize("found", (True, False))
def test_a_later_start_finds_the_verdict(start, found):
    ask, trials = start("GPU 1", found=found)
    assert [ask(), ask()] == [found] * 2
    assert trials == [KIND]
    ask, trials = start("GPU 1", found=not found)
    assert ask() == found
    assert trials == []


@pytest.mark.parametrize(
    "other", ({"state": "GPU 2"}, {"name": "batch"}, {"kept": None}), ids=("software", "check", "process alone")
)
def test_another_start_checks_again(start, other):
    ask, _ = start("GPU 1")
    ask()
    ask, trials = start(**{"state": "GPU 1"} | other)
    ask()
    assert trials == [KIND]


def test_another_kind_is_checked_and_both_are_kept(start):
    ask, _ = start("GPU 1")
    ask()
    ask, trials = start("GPU 1")
    other = (*KIND[:2], True)
    ask(other)
    assert trials == [other]
    ask, trials = start("GPU 1")
    assert ask()
    assert ask(other)
    assert trials == []


def test_a_check_that_fails_or_a_graph_keeps_nothing(start, monkeypatch):
    ask, _ = start("GPU 1")
    with monkeypatch.context() as patched:
        patched.setattr(cublas, "capturing", lambda operand: True)
        assert not ask()

    def broken():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        cublas.tried(cublas.Verdicts("GEMM"), KIND, OPERAND, broken)
    ask, trials = start("GPU 1")
    ask()
    assert trials == [KIND]


def test_a_captured_graph_does_not_take_a_kept_verdict(start, monkeypatch):
    ask, _ = start("GPU 1")
    ask()
    ask, _ = start("GPU 1")
    monkeypatch.setattr(cublas, "capturing", lambda operand: True)
    assert not ask(), "this process has not launched the kernel"


def test_the_state_names_the_driver_the_versions_and_the_variables(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device}"))
    monkeypatch.setattr(cublas, "DRIVER", tmp_path / "version")
    cublas._kept.cache_clear()
    assert cublas._kept(0) == ("", {})
    cublas._kept.cache_clear()
    states = []
    for change in (
        lambda: cublas.DRIVER.write_text("580"),
        lambda: cublas.DRIVER.write_text("581"),
        lambda: monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8"),
        lambda: monkeypatch.setattr(cublas, "installed", lambda name: "1.2"),
    ):
        change()
        states += [cublas._state(0), cublas._state(1)]
    assert len({repr(state) for state in states}) == len(states)
    monkeypatch.setenv("RANK", "1")
    assert cublas._state(1) == states[-1]
