# SPDX-License-Identifier: Apache-2.0
"""Which rows the next pass computes: prompts in chunks, then a token of each sequence. No choice here changes a bit.

A sequence waits, runs, and ends. Running ones have blocks for all their tokens. Where a block lacks, the sequence that
began last gives its blocks back and waits again, with the tokens that it has drawn.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile

import numpy as np

from tp_invariant_recipes.features.rollouts.requests import Completion, Request

BLOCK = 64  # tokens of a block, by default
SCRATCH = 0  # the block of rows that only fill up a pass; nobody gets it


def prefixes(tokens: Sequence[int], size: int) -> list[bytes]:
    """Return a name for the prefix that ends with each whole block of these tokens."""
    names, before = [], b""
    ids = np.array(tokens, np.int64)  # once: a conversion of each block takes the host longer than the hashes
    for start in range(0, len(ids) - size + 1, size):
        before = blake2b(before + ids[start : start + size].tobytes(), digest_size=16).digest()
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


@dataclass(eq=False)
class SampleState:
    """A sample of a request. computed: tokens whose keys are in `blocks`. The lists grow with each token drawn."""

    request: Request
    sample: int
    key: int  # request_key of its draws
    drawn: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)  # of the prefixes of its whole blocks, as of admission
    state: int = 0  # while it runs, where its recurrent state is; 0: nobody's

    def __len__(self) -> int:
        return len(self.request.tokens) + len(self.drawn)

    @property
    def most(self) -> int:
        """Tokens of prompt and completion, at most."""
        return len(self.request.tokens) + self.request.sampling.max_new_tokens

    def token(self, place: int) -> int:
        """Return a token of prompt and completion."""
        rest = place - len(self.request.tokens)
        return self.request.tokens[place] if rest < 0 else self.drawn[rest]

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens start … end - 1 of prompt and completion."""
        prompt = self.request.tokens
        more = self.drawn[max(0, start - len(prompt)) : max(0, end - len(prompt))]
        return (*prompt[start:end], *more)

    def completion(self, reason: str) -> Completion:
        """Return what it has become."""
        return Completion(
            self.request.id, self.sample, tuple(self.drawn), tuple(self.log_probabilities), tuple(self.ranks), reason,
            tuple(self.digests),
        )  # fmt: skip


@dataclass(slots=True)  # frozen ones take the host longer
class Span:
    """Tokens of a sequence that a pass computes: `count` from sequence.computed on."""

    sequence: SampleState
    count: int

    @property
    def draws(self) -> bool:
        """Whether its last row predicts the next token."""
        return self.sequence.computed + self.count == len(self.sequence)


class Schedule:
    """The sequences that wait and that run. most: that run side by side. chunk: tokens of a pass over prompts.

    shares: whether a block is all that later tokens read of a prefix; no sequence has another one's recurrent state.
    """

    def __init__(
        self, sequences: Iterable[SampleState], blocks: Blocks, most: int, chunk: int, *, shares: bool = True
    ) -> None:
        self.shares, self._states = shares, list(range(most, 0, -1))
        self.waiting, self.running = deque(sequences), list[SampleState]()
        self.blocks, self.most, self.chunk = blocks, most, chunk
        self.preemptions = 0
        self._behind = False  # whether running sequences may have more than a token to compute
        self.longest = 1  # tokens of a sequence that has run, at most

    def next(self) -> list[Span]:
        """Return the spans of the next pass: all of one row, or of prompts; empty: all have ended."""
        return self.prompts() or self._rows()

    def prompts(self) -> list[Span]:
        """Return spans of prompts, which may be asked for before the last draws are known; empty: there are none."""
        self._admit()
        spans, room = list[Span](), self.chunk
        for sequence in self.running if self._behind else ():
            if (count := min(room, len(sequence) - sequence.computed)) > 1:
                room -= count
                spans.append(Span(sequence, count))
        self._behind = bool(spans)
        return spans

    def _admit(self) -> None:
        """Run what waits, while there are blocks for it; not while its prompt is computed for another sample."""
        if not self.waiting:
            return
        computing = {name for s in self.running for name in s.names[s.computed // self.blocks.size :]}
        later: list[SampleState] = []
        while self.waiting and len(self.running) < self.most:
            sequence = self.waiting.popleft()
            prefix = sequence.tokens(0, len(sequence) - 1) if self.shares else ()  # the last token predicts
            names = prefixes(prefix, self.blocks.size)
            shared = self.blocks.shared(names)
            if computing.intersection(names[len(shared) :]):
                later.append(sequence)
                continue
            lacking = self.blocks.blocks_for(len(sequence)) - len(shared)
            if lacking + self.blocks.unused(shared) > self.blocks.free:
                later.append(sequence)
                break
            self.blocks.use(shared)
            sequence.blocks, sequence.names = [*shared, *self.blocks.take(lacking)], names
            sequence.computed = len(shared) * self.blocks.size
            sequence.state = self._states.pop()
            computing.update(names[len(shared) :])
            self.running.append(sequence)
            self._behind = True
            self.longest = max(self.longest, sequence.most)
        self.waiting.extendleft(reversed(later))

    def _rows(self) -> list[Span]:
        """Return a row of every running sequence, each with a block for it."""
        ready, size = 0, self.blocks.size
        while ready < len(self.running):
            sequence = self.running[ready]
            if sequence.computed >= len(sequence.blocks) * size:
                if not self.blocks.free:
                    self._preempt()
                    continue
                sequence.blocks += self.blocks.take(1)
            ready += 1
        return [Span(sequence, 1) for sequence in self.running]

    def _preempt(self) -> None:
        sequence = self.running[-1]
        self.end(sequence)  # its next admission gives it other blocks
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def computed(self, span: Span) -> None:
        """Note that a pass has computed a span: its whole blocks can be shared."""
        sequence, size = span.sequence, self.blocks.size
        before, sequence.computed = sequence.computed, sequence.computed + span.count
        for number in range(before // size, min(sequence.computed // size, len(sequence.names))):
            self.blocks.name(sequence.blocks[number], sequence.names[number])

    def end(self, sequence: SampleState) -> None:
        """End a sequence, which has its last token."""
        self.running.remove(sequence)
        self.blocks.give_back(sequence.blocks)
        self._states.append(sequence.state)

    def leave(self, sequence: SampleState) -> None:
        """End a sequence, wherever it is."""
        if sequence in self.running:
            self.end(sequence)
        else:
            self.waiting.remove(sequence)

    def forget(self) -> None:
        """Let all running sequences wait again: the keys in the cache are of other weights."""
        for sequence in reversed([*self.running]):
            self.end(sequence)
            self.waiting.appendleft(sequence)
        self.blocks = Blocks(self.blocks.count, self.blocks.size)
