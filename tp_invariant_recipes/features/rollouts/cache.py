"""Blocks of a cache of keys: which are free, who uses them, and which prefix of tokens each holds.

A block holds the keys of `size` consecutive positions. Keys depend on the tokens up to their own alone, so sequences
with equal beginnings share whole blocks. A block that nobody uses keeps its prefix until it is taken for another.
"""

from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile

import numpy as np

BLOCK = 64  # tokens of a block, by default
SCRATCH = 0  # the block of rows that only fill up a pass; nobody gets it


def prefixes(tokens: Sequence[int], size: int) -> list[bytes]:
    """Return a name for the prefix that ends with each whole block of these tokens."""
    names, before = [], b""
    for start in range(0, len(tokens) - size + 1, size):
        before = blake2b(before + np.array(tokens[start : start + size], np.int64).tobytes(), digest_size=16).digest()
        names.append(before)
    return names


class Blocks:
    """The blocks 1 … count of `size` tokens each."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._users = [0] * (count + 1)
        self._free = dict.fromkeys(range(1, count + 1))  # in the order in which they are taken
        self._names: dict[int, bytes] = {}
        self._of_prefix: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Blocks that nobody uses."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.size)

    def shared(self, names: Sequence[bytes]) -> list[int]:
        """Return the blocks that hold the first of these prefixes, as many as there are."""
        known = takewhile(self._of_prefix.__contains__, names)
        return [self._of_prefix[name] for name in known]

    def unused(self, blocks: Sequence[int]) -> int:
        """How many of these blocks nobody uses: `use` takes them from the free ones."""
        return sum(not self._users[block] for block in blocks)

    def use(self, blocks: Sequence[int]) -> None:
        """One more sequence uses these blocks."""
        for block in blocks:
            self._users[block] += 1
            self._free.pop(block, None)

    def take(self, count: int) -> list[int]:
        """Blocks that nobody uses, of which `free` says how many there are. Their prefixes are forgotten."""
        blocks = [block for block, _ in zip(self._free, range(count), strict=False)]
        for block in blocks:
            if (name := self._names.pop(block, None)) is not None:
                del self._of_prefix[name]
        self.use(blocks)
        return blocks

    def give_back(self, blocks: Sequence[int]) -> None:
        """Release blocks of a sequence. Its last ones are taken first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None

    def name(self, block: int, prefix: bytes) -> None:
        """Note that a block holds the keys of the last tokens of a prefix; another may hold the same ones."""
        if prefix not in self._of_prefix:
            self._of_prefix[prefix], self._names[block] = block, prefix
