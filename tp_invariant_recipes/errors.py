"""The kinds of mistake a user can mend. The CLI prints the message on one screen and exits with status 2."""

from collections.abc import Sequence


class TpiError(Exception):
    """Something the user can mend; the message says what and how."""


class ConfigError(TpiError):
    """The configuration is wrong; lists every problem and the key that mends each.

    problems: the same one by one, for a caller that has more to list.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)


class DataError(TpiError):
    """Training data is missing, unreadable, empty or not what it claims to be."""


class RunError(TpiError):
    """A run could not start, or one of its ranks died."""


class CheckpointError(TpiError):
    """A checkpoint is damaged, incomplete or belongs to another run."""


class LedgerError(TpiError):
    """A ledger cannot be read or continued."""
