"""Open a ledger in a run directory, in a separate file or in a certificate."""

import os

from tp_invariant_recipes.ledger.certificate import open_certificate
from tp_invariant_recipes.ledger.reader import CERTIFICATE_START, Ledger, contents, ledger_file, parse


def read(path: str | os.PathLike) -> Ledger:
    """Read and check the ledger of a run directory, a ledger file, or the ledger in a certificate.

    LedgerError, naming the file and the line: it is missing or unreadable, not a ledger, was altered, or a step is
    missing, repeated or out of order. Only a torn last line is no error, since a killed run leaves one.
    """
    file = ledger_file(path)
    data = contents(file)
    if data.startswith(CERTIFICATE_START):
        return open_certificate(file, data).ledger
    return parse(file, data)
