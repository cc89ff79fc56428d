# SPDX-License-Identifier: Apache-2.0
"""Text for people: numbers with their nouns, long lists, and what others wrote, made safe to show."""

import re
from collections.abc import Sequence


def plural(count: int, noun: str, form: str = "") -> str:
    """Such as "1 step" and "2 steps". form: of the number, such as "," for "10,000 steps"."""
    return f"{count:{form}} {noun}" + ("" if count == 1 else "s")


def abbreviated(items: Sequence[str], most: int, separator: str = ", ") -> str:
    """Return the first items and the number of others, such as "a, b and 2 more", or "a; b; and 2 more"."""
    more = f"{separator.rstrip(', ')} and {len(items) - most} more" if len(items) > most else ""
    return f"{separator.join(items[:most])}{more}"


LONGEST = 300  # characters of a foreign message

# C0 but tab and newline, DEL, C1, bidirectional controls, and surrogates, which no encoding of a terminal can hold.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Return the text with each control character as its escape: ESC as \x1b. Tabs and newlines stay."""
    return _CONTROL.sub(_escape, text)


def single_line(text: str) -> str:
    """Return the text on one line: newlines and tabs become escapes, too."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def first_line(text: str) -> str:
    """Return the first line of another program's message: what follows may be a tensor, or thousands of names."""
    lines = text.strip().splitlines() or [""]
    cut = lines[0] if len(lines[0]) <= LONGEST else f"{lines[0][:LONGEST]} …"
    return cut if len(lines) == 1 or cut.endswith("…") else f"{cut} …"


def shortened(text: str) -> str:
    """Another program's message on one line, each run of white space a space, its end left out where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} …"


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
