"""Which sequence of a packed row is computed now (megatron/attention/packed.py), for what counts by sequence."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SequencePass:
    """A forward pass over one sequence of a row, and its backward pass, which may compute the forward pass again.

    row, number: of the row in this process, and of the sequence in its row.
    idle:        whether the pass only takes part in the experts' exchanges: it routes no token, and counts nowhere.
    loss_share:  factor of an auxiliary loss: the sequence's part of the row's tokens, where the main loss is a row's
                 mean; 1 where losses are divided by the tokens of a step.
    metric_share: factor of an auxiliary loss in the log, which has one value a row.
    """

    row: int
    number: int
    idle: bool = False
    loss_share: float = 1.0
    metric_share: float = 1.0


_current: list[SequencePass | None] = [None]


def current() -> SequencePass | None:
    """Return the pass that runs; None: rows are not packed."""
    return _current[0]


def enter(now: SequencePass | None) -> None:
    """Begin a pass, or end the last one of a row."""
    _current[0] = now
