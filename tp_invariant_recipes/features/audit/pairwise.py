"""Choose few cells that cover every pair of settings once."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import combinations

Cell = frozenset[str]
MOST = 6  # settings of a cell: a fault among more takes long to shrink


def pairs(axes: Sequence[Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Each two settings of different axes, in the order of the axes."""
    for first, second in combinations(axes, 2):
        yield from ((a, b) for a in first for b in second)


class Covering:
    """The pairs that no cell has covered yet.

    axes:    rows of overrides; a cell has at most one setting of an axis.
    layouts: how many of the axes, the first ones, change the layout. Every cell has such a setting: the others alone
             leave nothing to compare.
    allowed: whether a run may have these settings together.
    cost:    the cost of a setting; cheap cells come first.
    """

    def __init__(
        self,
        axes: Sequence[Sequence[str]],
        layouts: int,
        allowed: Callable[[Cell], bool],
        cost: Callable[[str], int] = lambda setting: 1,
    ) -> None:
        self._axis = {setting: n for n, axis in enumerate(axes) for setting in axis}
        self._layouts, self._allowed, self._cost = layouts, allowed, cost
        cells = [frozenset(pair) for pair in pairs(axes)]
        cells += [frozenset((setting,)) for axis in axes[:layouts] for setting in axis]
        self.pending: dict[Cell, None] = dict.fromkeys(sorted(cells, key=lambda cell: math.prod(map(cost, cell))))
        self.total = len(self.pending)

    def changes_layout(self, cell: Cell) -> bool:
        """Whether the cell and its reference differ."""
        return any(self._axis[setting] < self._layouts for setting in cell)

    def cover(self, cell: Cell) -> None:
        """Nothing of this cell need be tried again."""
        for pair in [pair for pair in self.pending if pair <= cell]:
            del self.pending[pair]

    def next(self, running: Collection[Cell] = ()) -> Cell | None:
        """Return the next cell: the first pending pair, and what fits beside it; None: nothing is left.

        A pair that no run may have is dropped from `pending`. running: cells that may cover pairs soon.
        """
        before = [*self.pending]
        for begun in running:
            self.cover(begun)
        covered = {pair for pair in before if pair not in self.pending}
        try:
            for pair in [*self.pending]:
                if (cell := self._seed(pair)) is not None:
                    return self._grown(cell)
                del self.pending[pair]
            return None
        finally:
            self.pending = dict.fromkeys(pair for pair in before if pair in self.pending or pair in covered)

    def _seed(self, pair: Cell) -> Cell | None:
        """Return the pair, with a layout and, where it needs one, another setting."""
        layouts = (
            [pair]
            if self.changes_layout(pair)
            else [pair | {s} for s in self._axis if self.changes_layout(frozenset((s,)))]
        )
        candidates = [*layouts, *(pair | {setting} for setting in self._axis if self._fits(pair, setting))]
        return next((cell for cell in candidates if self.changes_layout(cell) and self._allowed(cell)), None)

    def _fits(self, cell: Cell, setting: str) -> bool:
        return self._axis[setting] not in {self._axis[other] for other in cell}

    def _grown(self, cell: Cell) -> Cell:
        while len(cell) < MOST:
            gains = {
                setting: sum(frozenset((setting, other)) in self.pending for other in cell)
                for setting in self._axis
                if self._fits(cell, setting) and not (self._axis[setting] < self._layouts and self._cost(setting) > 1)
            }
            best = sorted((s for s in gains if gains[s]), key=lambda setting: -gains[setting])
            larger = next((cell | {setting} for setting in best if self._allowed(cell | {setting})), None)
            if larger is None:
                break
            cell = larger
        return cell


def shrunk(cell: Cell, fails: Callable[[Cell], bool]) -> Cell:
    """Return the smallest part of a cell that still fails, one setting after the other left out."""
    for setting in sorted(cell, key=lambda words: (words.startswith(("tp", "pp", "cp", "dp", "ep", "mbs")), words)):
        if fails(cell - {setting}):
            cell = cell - {setting}
    return cell
