"""Help texts out of docstrings: typer keeps the line breaks of a paragraph, which break its sentences at 80 columns."""

import inspect
from collections.abc import Callable
from typing import Any


def help_text(command: Callable[..., Any]) -> str:
    """The docstring of a command with each paragraph on one line, for typer to wrap.

    A paragraph that begins with a line of `\\b` keeps its line breaks: examples.
    """
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    # The mark alone on its line would be an empty line.
    return "\n\n".join("\b" + p[2:] if p.startswith("\b\n") else " ".join(p.split()) for p in paragraphs)
