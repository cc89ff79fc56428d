# SPDX-License-Identifier: Apache-2.0
"""Output whose reader has gone is dropped: it changes no exit status and stops no command."""

import gc
import os
import subprocess
import sys

import pytest
from rich.table import Table

from tests.ledgers import record, write
from tp_invariant_recipes.ledger.record import Header
from tp_invariant_recipes.machine import terminal


@pytest.fixture
def ledgers(tmp_path):
    """Runs a and same are equal, b differs."""
    for name, loss in (("a", "f32:40c80000"), ("same", "f32:40c80000"), ("b", "f32:40c80001")):
        write(tmp_path / name, Header(identity={"rng.seed": 1}), [record(step, loss=loss) for step in range(1, 4)])
    return tmp_path


def broken_pipe() -> int:
    """A descriptor to write to that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def tpi_process(folder, *arguments: str, closed: bool = False) -> tuple[int, bytes]:
    """Exit status and standard error of a process of its own, whose end flushes its output, too.

    closed: standard output is closed from the start; else its reader has gone.
    """
    pipe = broken_pipe()
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "tp_invariant_recipes", *arguments],
            cwd=folder,
            stdout=pipe,
            stderr=subprocess.PIPE,
            preexec_fn=(lambda: os.close(1)) if closed else None,
        )
    finally:
        os.close(pipe)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    "command, status",
    (
        ("compare a b", 1),
        pytest.param("compare a same", 0, marks=pytest.mark.release),
        pytest.param("compare a b --json", 1, marks=pytest.mark.release),
        pytest.param("compare a missing", 2, marks=pytest.mark.release),
        pytest.param("models", 0, marks=pytest.mark.release),
    ),
)
def test_a_command_whose_reader_has_gone_keeps_its_exit_status(ledgers, command, status):
    code, text = tpi_process(ledgers, *command.split())
    said = [line for line in text.splitlines() if not line.startswith((b"reading ", b"comparing: "))]  # if it takes 2 s
    assert code == status
    assert (b"missing" in text) if status == 2 else said == []


def test_a_closed_standard_output_is_no_file_of_tpi(ledgers):
    assert tpi_process(ledgers, "compare", "a", "b", closed=True) == (1, b"")


def test_what_is_written_after_the_reader_has_gone_is_dropped_and_what_others_write_there_too():
    pipe = broken_pipe()
    stream = terminal._stream(pipe, line_buffering=True, closefd=True)
    stream.write("one\n")
    stream.write("two\n" * 10_000)
    assert stream.buffer.raw.gone
    assert os.write(pipe, b"of a library\n")
    stream.close()


# What is written whole at Python's end, at once, and to standard error, which decides nothing.
@pytest.mark.parametrize(
    "stream, words, status",
    ((1, "compare a b --json", 2), (1, "compare a b", 2), (2, "data prepare a.txt --output b", 0)),
)
def test_output_to_a_full_disk_is_one_message_and_never_120(ledgers, stream, words, status):
    (ledgers / "a.txt").write_text("text\n" * 100)
    command = [sys.executable, "-m", "tp_invariant_recipes", *words.split()]
    pipes = {1: subprocess.PIPE, 2: subprocess.PIPE}
    with open("/dev/full", "wb") as full:
        pipes[stream] = full
        ended = subprocess.run(command, cwd=ledgers, stdout=pipes[1], stderr=pipes[2], text=True)
    assert ended.returncode == status
    if stream == 1:
        assert ended.stderr == "error: the disk is full: standard output: No space left on device\n"


def test_a_table_that_a_program_reads_has_no_box_and_whole_rows(capsys):
    table = Table("first", "second")
    table.add_row("a", "word " * 40 + "end")
    terminal.console().print(table)
    _, row = capsys.readouterr().out.splitlines()
    assert row.split()[0] == "a"
    assert row.rstrip().endswith("word end")
    terminal.console(force_terminal=True, width=40).print(Table("first"))
    assert "━" in capsys.readouterr().out


def test_output_to_a_terminal_that_hung_up_is_dropped():
    """A write to it fails with EIO, which of a file means that its disk is broken."""
    other, end = os.openpty()
    os.close(other)
    stream = terminal._stream(end, line_buffering=True)
    print("a line", file=stream)
    assert stream.buffer.raw.gone
    print("another line", file=stream)
    os.close(end)
    assert not terminal._Surviving(os.open(os.devnull, os.O_WRONLY), "w")._reader_gone(OSError(28, "disk full"))


def test_a_console_of_its_own_closes_its_file():
    """A program for which a ResourceWarning is an error calls functions that make one each."""
    console = terminal.console_of_its_own()
    file = console.file
    del console
    gc.collect()
    assert file.closed
