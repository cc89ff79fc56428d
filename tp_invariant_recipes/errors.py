"""The kinds of mistake a user can mend. The CLI prints the message on one screen and exits with status 2."""


class TpiError(Exception):
    """Something the user can mend; the message says what and how."""


class ConfigError(TpiError):
    """The configuration is wrong; lists every problem and the key that mends each."""


class DataError(TpiError):
    """Training data is missing, unreadable, empty or not what it claims to be."""


class RunError(TpiError):
    """A run could not start, or one of its ranks died."""


class CheckpointError(TpiError):
    """A checkpoint is damaged, incomplete or belongs to another run."""


class LedgerError(TpiError):
    """A ledger cannot be read or continued."""
