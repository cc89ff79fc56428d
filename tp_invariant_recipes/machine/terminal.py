# SPDX-License-Identifier: Apache-2.0
"""Standard output and error. Commands print through this module and in no other way.

Output whose reader has gone is dropped, so `tpi … | head -1` neither stops a training nor changes an exit status.
Control characters in text become visible, so a name or a log of a stranger cannot control the terminal.
"""

import errno
import io
import json
import os
import stat
import sys
import weakref
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from tp_invariant_recipes.text import visible

PIPED = 10_000  # characters of a line of a table that no terminal shows


class _Surviving(io.FileIO):
    """A descriptor to write to. Once its reader has gone, or its disk is full, it leads to /dev/null."""

    gone = False

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            gone = self._reader_gone(error)
            self.gone |= gone
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, self.fileno(), os.get_inheritable(self.fileno()))  # also for what libraries in C++ write
            os.close(sink)
            if self.fileno() == 1 and not gone:  # once: Python would raise it again at its end, with its own status
                raise OSError(error.errno, f"standard output: {error.strerror}") from None
            return memoryview(data).nbytes

    def _reader_gone(self, error: OSError) -> bool:
        """Whether a pipe or a socket has no reader any more, or a terminal has hung up."""
        hung_up = error.errno == errno.EIO and stat.S_ISCHR(os.fstat(self.fileno()).st_mode)
        return isinstance(error, ConnectionError) or hung_up


def install() -> None:
    """Make standard output and error survive their readers. A test's own stream stays.

    A closed standard descriptor becomes /dev/null: the next file that is opened would take its number and get output.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        current = getattr(sys, name)
        if current is None or _replaceable(current, descriptor):
            line_buffering = descriptor == 2 or getattr(current, "line_buffering", False)
            encoding = getattr(current, "encoding", None) or "utf-8"
            setattr(sys, name, _stream(descriptor, encoding=encoding, line_buffering=line_buffering))


def reader_gone() -> bool:
    """Whether standard output has lost its reader."""
    return getattr(getattr(getattr(sys.stdout, "buffer", None), "raw", None), "gone", False)


class _Console(Console):
    """A console that styles what we print and shows foreign control characters as text.

    A table is for people: where a program reads, it has no lines around it, and each row is one line.
    """

    def print(self, *objects: Any, **settings: Any) -> None:
        if self.is_terminal or not any(isinstance(value, Table) for value in objects):
            super().print(*objects, **settings)
            return
        width, self.width = self.width, PIPED
        for value in objects:
            if isinstance(value, Table):
                value.box = None
        super().print(*objects, **settings)
        self.width = width

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def console(*, stderr: bool = False, **settings: Any) -> Console:
    """Return a console on standard output or error. settings: as for rich."""
    return _Console(stderr=stderr, highlight=False, **settings)


def console_of_its_own() -> Console:
    """Get a console on a copy of standard error, so that a spinner turns while third parties' output is redirected."""
    file = _stream(os.dup(2), line_buffering=True, closefd=True)
    console = _Console(file=file, highlight=False)
    weakref.finalize(console, file.close)  # one that nobody closes is a ResourceWarning
    return console


def print_line(to: Console, line: str | Text, style: str = "") -> None:
    """Print a line to a console. It is never folded, since paths are copied from it, and has no markup."""
    to.print(line if isinstance(line, Text) else Text(line, style=style), soft_wrap=True)


def print_all(to: Console, lines: Iterable[str | Text | Table]) -> None:
    """Print lines and tables in turn."""
    for line in lines:
        if isinstance(line, Table):
            to.print(line)
        else:
            print_line(to, line)


def rendered(lines: Iterable[str | Text | Table]) -> str:
    """Return what `print_all` writes to a file."""
    file = io.StringIO()
    plain = _Console(file=file, highlight=False, force_jupyter=False, force_terminal=False)  # in a notebook, too
    print_all(plain, lines)
    return file.getvalue()


def print_text(text: str = "", end: str = "\n") -> None:
    """Print plain text, as one write."""
    sys.stdout.write(visible(text) + end)


def json_text(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON, in ASCII without a control character."""
    return json.dumps(value, indent=indent).replace("\x7f", "\\u007f")


def print_json(value: Any, indent: int | None = None) -> None:
    """Print a value as JSON."""
    print_text(json_text(value, indent))


def _stream(descriptor: int, *, line_buffering: bool, encoding: str = "utf-8", closefd: bool = False) -> TextIO:
    raw = _Surviving(descriptor, "w", closefd=closefd)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=line_buffering
    )


def _replaceable(stream: TextIO, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor and not isinstance(getattr(stream.buffer, "raw", None), _Surviving)
    except (OSError, ValueError, AttributeError):  # a stream in memory
        return False
