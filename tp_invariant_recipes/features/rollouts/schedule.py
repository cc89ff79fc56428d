"""Which rows the next pass computes: prompts in chunks, then a token of each sequence. No choice here changes a bit.

A sequence waits, runs, and ends. Running ones have blocks for all their tokens. Where a block lacks, the sequence that
began last gives its blocks back and waits again, with the tokens that it has drawn.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tp_invariant_recipes.features.rollouts.cache import Blocks, prefixes
from tp_invariant_recipes.features.rollouts.requests import Completion, Request


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

    def __len__(self) -> int:
        return len(self.request.tokens) + len(self.drawn)

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


@dataclass(frozen=True)
class Span:
    """Tokens of a sequence that a pass computes: `count` from sequence.computed on."""

    sequence: SampleState
    count: int

    @property
    def draws(self) -> bool:
        """Whether its last row predicts the next token."""
        return self.sequence.computed + self.count == len(self.sequence)


class Schedule:
    """The sequences that wait and that run. most: that run side by side. chunk: tokens of a pass over prompts."""

    def __init__(self, sequences: Iterable[SampleState], blocks: Blocks, most: int, chunk: int) -> None:
        self.waiting, self.running = deque(sequences), list[SampleState]()
        self.blocks, self.most, self.chunk = blocks, most, chunk
        self.preemptions = 0

    def next(self) -> list[Span]:
        """Return the spans of the next pass: all of one row, or of prompts; empty: all have ended."""
        return self.prompts() or self._rows()

    def prompts(self) -> list[Span]:
        """Return spans of prompts, which may be asked for before the last draws are known; empty: there are none."""
        self._admit()
        spans, room = [], self.chunk
        for sequence in self.running:
            if (count := min(room, len(sequence) - sequence.computed)) > 1:
                room -= count
                spans.append(Span(sequence, count))
        return spans

    def _admit(self) -> None:
        """Run what waits, while there are blocks for it; not while its prompt is computed for another sample."""
        computing = {name for s in self.running for name in s.names[s.computed // self.blocks.size :]}
        later: list[SampleState] = []
        while self.waiting and len(self.running) < self.most:
            sequence = self.waiting.popleft()
            names = prefixes(sequence.tokens(0, len(sequence) - 1), self.blocks.size)  # the last token predicts
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
            computing.update(names[len(shared) :])
            self.running.append(sequence)
        self.waiting.extendleft(reversed(later))

    def _rows(self) -> list[Span]:
        """Return a row of every running sequence, each with a block for it."""
        ready = 0
        while ready < len(self.running):
            sequence = self.running[ready]
            if len(sequence) > len(sequence.blocks) * self.blocks.size:
                if not self.blocks.free:
                    self._preempt()
                    continue
                sequence.blocks += self.blocks.take(1)
            ready += 1
        return [Span(sequence, 1) for sequence in self.running]

    def _preempt(self) -> None:
        sequence = self.running.pop()
        self.blocks.give_back(sequence.blocks)  # its next admission gives it others
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def computed(self, span: Span) -> None:
        """Note that a pass has computed a span: its whole blocks can be shared."""
        sequence, size = span.sequence, self.blocks.size
        before, sequence.computed = sequence.computed, sequence.computed + span.count
        whole = sequence.computed // size
        for number in range(before // size, min(whole, len(sequence.names))):
            self.blocks.name(sequence.blocks[number], sequence.names[number])

    def end(self, sequence: SampleState) -> None:
        """End a sequence, which has its last token."""
        self.running.remove(sequence)
        self.blocks.give_back(sequence.blocks)
