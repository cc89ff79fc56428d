"""Which sequences a forward pass computes, and how long each becomes.

A sequence is a leaf, as in training. Its padded length depends on its own length alone. So where the bits of a row
depend on how many lie beside it (a library's products on a CPU), it is computed by itself, on a shape that no batch
changes. Where rows are independent, sequences of one padded length share a pass.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tp_invariant_recipes.data.sequences import Sequence

LEAST = 64  # tokens; a multiple of every tp with sequence parallelism
STEPS = 8  # padded lengths between a power of two and the next: at most 1/8 of a sequence is padding
# Tokens that are sorted by length, computed and written together, by what torch calls the device; about a minute's.
WINDOWS = {"cuda": 1 << 18, "cpu": 1 << 14}
MOST = 4096  # sequences of a window


@dataclass(frozen=True)
class Batch:
    """One forward pass. places: of its sequences in the window. length: tokens of each, with padding."""

    places: tuple[int, ...]
    length: int


def padded(length: int, multiple: int) -> int:
    """Return the tokens that a sequence is computed with. multiple: what must divide it, a power of two."""
    step = max(LEAST, multiple, (1 << (length - 1).bit_length()) // (2 * STEPS))
    return -(-length // step) * step


def windows(sequences: Iterable[Sequence], most: int) -> Iterator[list[Sequence]]:
    """Yield the sequences in parts of about `most` tokens, so that memory does not grow with the file."""
    window: list[Sequence] = []
    tokens = 0
    for sequence in sequences:
        window.append(sequence)
        tokens += len(sequence.tokens)
        if tokens >= most or len(window) == MOST:
            yield window
            window, tokens = [], 0
    if window:
        yield window


def plan(lengths: list[int], multiple: int, tokens: int, ranks: int, rank: int) -> list[Batch]:
    """Return the passes of one of several data-parallel ranks over a window; every rank has as many.

    lengths: of the sequences. tokens: of a pass, at most; 0: every sequence by itself. multiple: as of `padded`.
    A pass that only fills up has no place of its own: it repeats another rank's.
    """
    sized: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        sized.setdefault(padded(length, multiple), []).append(place)
    batches = []
    for length, places in sorted(sized.items(), reverse=True):  # the longest first: memory runs out early or never
        batches += [Batch(tuple(part), length) for part in _divided(places, _power(max(1, tokens // length)))]
    rounds = -(-len(batches) // ranks)
    return [batches[min(n * ranks + rank, len(batches) - 1)] for n in range(rounds)]


def _divided(places: list[int], most: int) -> Iterator[list[int]]:
    """Parts of `most`, then of smaller powers of two, so that few shapes occur: products are tried for each."""
    while places:
        size = min(most, _power(len(places)))
        yield places[:size]
        places = places[size:]


def _power(most: int) -> int:
    return 1 << (most.bit_length() - 1)
