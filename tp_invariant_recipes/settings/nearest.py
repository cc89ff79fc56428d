"""The closest real name to a misspelt one."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint to append to an error: "; did you mean 'x'?", or the names when few, or nothing."""
    known = sorted(set(names))
    close = get_close_matches(name, known, n=1, cutoff=0.6) or get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    if not close and "." in name:
        # The section may be wrong while the field is right.
        leaf = name.rpartition(".")[2]
        close = (
            get_close_matches(leaf, [k for k in known], n=1, cutoff=0.75)
            or [k for k in known if k.rpartition(".")[2] == leaf][:1]
        )
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; there are: {', '.join(known)}" if 0 < len(known) <= 12 else ""
