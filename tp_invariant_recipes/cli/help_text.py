"""Help texts out of docstrings: typer keeps the line breaks of a paragraph, which break its sentences at 80 columns."""

import inspect
from collections.abc import Callable
from typing import Any


def help_text(command: Callable[..., Any]) -> str:
    """The docstring of a command with each paragraph on one line, for typer to wrap.

    A paragraph that begins with a line of `\\b` keeps its line breaks: examples.
    """
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(_kept(text) if text.startswith("\b\n") else " ".join(text.split()) for text in paragraphs)


def _kept(paragraph: str) -> str:
    """The mark alone on its line would be an empty line."""
    return paragraph.replace("\b\n", "\b", 1)
