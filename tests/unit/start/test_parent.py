"""Processes end with the one that started them, though it ended before they could ask for that."""

import multiprocessing
import os
import signal
import time

import pytest
import torch

from tp_invariant_recipes.start import forking, parent


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


@pytest.mark.parametrize("function", (parent.end_with_starter, parent.serve_starter))
def test_a_process_whose_starter_is_dead_ends_at_once(function):
    context = multiprocessing.get_context("fork")
    actual, expected = context.Pipe()
    starter = context.Process(target=_starter, args=(function, expected))
    starter.start()
    expected.close()
    starter.join()
    _assert_closed(actual)


def test_the_writer_of_checkpoints_asks_for_that_first(monkeypatch):
    from tp_invariant_recipes.training import async_writer

    class AskedError(Exception):
        pass

    def ask():
        raise AskedError

    monkeypatch.setattr(parent, "serve_starter", ask)
    with pytest.raises(AskedError):
        async_writer.loop(0)


def test_a_process_that_serves_ignores_what_is_for_its_starter():
    context = multiprocessing.get_context("fork")
    actual, expected = context.Pipe()

    def serve():
        parent.serve_starter()
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
