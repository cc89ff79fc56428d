"""Numbers with their nouns, and long lists, for people."""

from collections.abc import Sequence


def counted(count: int, noun: str, form: str = "") -> str:
    """Such as "1 step" and "2 steps". form: of the number, such as "," for "10,000 steps"."""
    return f"{count:{form}} {noun}" + ("" if count == 1 else "s")


def few(items: Sequence[str], most: int, separator: str = ", ") -> str:
    """Return the first items and the number of others, such as "a, b and 2 more", or "a; b; and 2 more"."""
    more = f"{separator.rstrip(', ')} and {len(items) - most} more" if len(items) > most else ""
    return f"{separator.join(items[:most])}{more}"
