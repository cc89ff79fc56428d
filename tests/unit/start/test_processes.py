# SPDX-License-Identifier: Apache-2.0
"""Forked processes use a GPU or are not forked, and end with what started them."""

import multiprocessing
import os
import signal
import sys
import time
import warnings
from types import ModuleType

import pytest
import torch

from tp_invariant_recipes.launch import ranks
from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.start import bridge, forking


def yes() -> bool:
    return True


def test_what_nothing_has_started_can_be_forked():
    assert forking.can_fork(dict(os.environ), probe=yes)


def never() -> bool:
    raise AssertionError("the probe takes seconds, and the answer is known")


# CUDA has started; this is a fork of such a process; a library would read another variable.
REASONS = {
    "started": lambda monkeypatch: monkeypatch.setattr(torch.cuda, "is_initialized", yes),
    "fork": lambda monkeypatch: monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", yes),
    "variable": lambda monkeypatch: monkeypatch.setenv("NVTE_FLASH_ATTN", "0"),
}


@pytest.mark.parametrize("why", REASONS)
def test_otherwise_ranks_are_spawned(monkeypatch, why):
    before = dict(os.environ)
    REASONS[why](monkeypatch)
    assert not forking.can_fork(before, probe=never)


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """A machine with a driver, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recipe = ModuleType("recipe")
    recipe.__file__ = str(tmp_path / "recipe.py")
    monkeypatch.setitem(sys.modules, "recipe", recipe)
    monkeypatch.setattr(forking, "DRIVER", tmp_path / "version")
    forking.DRIVER.write_text("1")
    return forking.DRIVER


CHANGES = {
    "another driver": lambda monkeypatch, driver: driver.write_text("2"),
    "no driver": lambda monkeypatch, driver: driver.unlink(),
    "another variable": lambda monkeypatch, driver: monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER"),
    "another module": lambda monkeypatch, driver: monkeypatch.setitem(sys.modules, "starts", ModuleType("starts")),
    "another installation": lambda monkeypatch, driver: monkeypatch.syspath_prepend(str(driver.parent)),
    "another recipe": lambda monkeypatch, driver: (driver.parent / "recipe.py").write_text("x = 2"),
}


def test_a_success_is_kept(driver):
    assert forking.can_fork(dict(os.environ), probe=yes)
    assert forking.can_fork(dict(os.environ), probe=never)


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_it_is_tried(monkeypatch, driver, change):
    assert forking.can_fork(dict(os.environ), probe=yes)
    CHANGES[change](monkeypatch, driver)
    assert not forking.can_fork(dict(os.environ), probe=lambda: False)


def test_a_failure_is_not_kept(driver):
    assert not forking.can_fork(dict(os.environ), probe=lambda: False)
    assert forking.can_fork(dict(os.environ), probe=yes)


def test_what_the_launcher_sets_later_does_not_count(monkeypatch):
    before = dict(os.environ)
    for name in forking.SET_LATER:
        monkeypatch.setenv(name, "7")
    assert forking.can_fork(before, probe=yes)


def test_a_driver_that_something_else_has_started_is_detected_by_trying():
    """torch knows nothing of it. There is no GPU in a unit test, so the forked process fails as such a one does."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: tests/gpu looks at it")
    assert not forking.can_fork(dict(os.environ))


@pytest.mark.parametrize(
    "child, well",
    ((lambda: os._exit(0), True), (lambda: os._exit(1), False), (lambda: os.kill(os.getpid(), signal.SIGKILL), False)),
    ids=("0", "1", "a signal"),
)
def test_the_end_of_the_forked_process(child, well):
    pid = os.fork()
    if pid == 0:
        child()
    assert forking.exits_cleanly(pid, 60) is well


def test_a_forked_process_that_hangs_is_killed():
    """CUDA may wait for ever for a lock that the parent held."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)  # for ever
        os._exit(0)
    assert not forking.exits_cleanly(pid, 0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(
    "device, asked, can, method",
    (
        ("cpu", "0", False, "fork"), ("gpu", None, True, "fork"), ("gpu", "1", True, "fork"),
        ("gpu", None, False, "spawn"), ("gpu", "1", False, "spawn"), ("gpu", "0", True, "spawn"),
    ),
)  # fmt: skip
def test_the_method_of_the_ranks(monkeypatch, device, asked, can, method):
    monkeypatch.delenv(ranks.FORK, raising=False)
    if asked is not None:
        monkeypatch.setenv(ranks.FORK, asked)
    monkeypatch.setattr(ranks, "can_fork", lambda imported_with: can)
    assert ranks.start_method(device) == method


def test_while_bridge_is_imported_the_driver_says_what_a_gpu_can_do(monkeypatch):
    original = torch.cuda.get_device_capability
    monkeypatch.setattr(gpus, "visible", lambda: [gpus.Gpu("NVIDIA H200", (9, 0), 1 << 37)])
    with bridge._nvml_only():
        assert torch.cuda.get_device_capability() == (9, 0)
        monkeypatch.setattr(gpus, "visible", lambda: [])
        with pytest.raises((AssertionError, RuntimeError)):  # the control: torch itself, which starts CUDA
            torch.cuda.get_device_capability()
    assert torch.cuda.get_device_capability is original
    assert not torch.cuda.is_initialized()


def test_a_warning_of_an_import_is_no_error_where_warnings_are(monkeypatch):
    monkeypatch.delenv(bridge.VERBOSE, raising=False)
    with warnings.catch_warnings(action="error"), bridge.quiet():
        warnings.warn("Apex is not installed", stacklevel=1)


def _child(function, go, pipe):
    while os.getppid() == multiprocessing.parent_process().pid and not go.is_set():
        time.sleep(0.01)  # as a new process that still imports
    function()
    pipe.send("lives on")
    time.sleep(5)


def _starter(function, pipe):
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_child, args=(function, context.Event(), pipe))
    child.start()
    os.kill(os.getpid(), signal.SIGKILL)


def _assert_closed(pipe):
    """What ended processes had open is closed."""
    assert pipe.poll(10)
    with pytest.raises(EOFError):
        pipe.recv()


@pytest.mark.parametrize("function", (forking.end_with_starter, forking.serve_starter))
def test_a_process_whose_starter_is_dead_ends_at_once(function):
    context = multiprocessing.get_context("fork")
    actual, expected = context.Pipe()
    starter = context.Process(target=_starter, args=(function, expected))
    starter.start()
    expected.close()
    starter.join()
    _assert_closed(actual)


def test_a_process_that_serves_ignores_what_is_for_its_starter():
    context = multiprocessing.get_context("fork")
    actual, expected = context.Pipe()

    def serve():
        forking.serve_starter()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            os.kill(os.getpid(), number)
        expected.send("lives")

    process = context.Process(target=serve)
    process.start()
    assert actual.poll(10)
    process.join()
    assert process.exitcode == 0


def _probe(pipe):
    """A launcher that asks whether a fork can use a GPU, whose driver never answers."""

    def hang(*_, **__):
        pipe.send(os.getpid())
        time.sleep(60)

    torch.ones = hang
    forking._fork_uses_gpu()


def test_a_probe_of_the_gpu_ends_with_its_launcher():
    context = multiprocessing.get_context("fork")
    actual, expected = context.Pipe()
    launcher = context.Process(target=_probe, args=(expected,))
    launcher.start()
    expected.close()
    assert actual.poll(10)
    actual.recv()
    launcher.kill()
    launcher.join()
    _assert_closed(actual)
