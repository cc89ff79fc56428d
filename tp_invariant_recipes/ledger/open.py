"""Open a ledger in a run directory, in a separate file or in a certificate."""

import os
from collections.abc import Callable

from tp_invariant_recipes.ledger.certificate import open_certificate
from tp_invariant_recipes.ledger.reader import CERTIFICATE_START, Decoded, Ledger, contents, ledger_file, parse


def read(
    path: str | os.PathLike, *, decoded: Decoded | None = None, progress: Callable[[int, int], None] | None = None
) -> Ledger:
    """Read and check the ledger of a run directory, a ledger file, or the ledger in a certificate.

    LedgerError, naming the file and the line: it is missing or unreadable, not a ledger, was altered, or a step is
    missing, repeated or out of order. Only a torn last line is no error, since a killed run leaves one.
    decoded, progress: as for `reader.parse`; a certificate's ledger is read without.
    """
    file = ledger_file(path)
    data = contents(file)
    if data.startswith(CERTIFICATE_START):
        return open_certificate(file, data).ledger
    return parse(file, data, decoded=decoded, progress=progress)
