# SPDX-License-Identifier: Apache-2.0
"""Open a ledger in a run directory, in a separate file or in a certificate."""

import os
from pathlib import Path

from tp_invariant_recipes.ledger import stream
from tp_invariant_recipes.ledger.certificate import open_certificate
from tp_invariant_recipes.ledger.reader import (
    CERTIFICATE_START,
    Ledger,
    Progress,
    contents,
    ledger_file,
    parse,
    reading,
)
from tp_invariant_recipes.reading import open_file


def read(path: str | os.PathLike, *, progress: Progress | None = None) -> Ledger:
    """Read and check the ledger of a run directory, a ledger file, or the ledger in a certificate.

    LedgerError, naming the file and the line: it is missing or unreadable, not a ledger, was altered, or a step is
    missing, repeated or out of order. Only a torn last line is no error, since a killed run leaves one.
    progress: as for `reader.parse`; a certificate's ledger is read without.
    """
    file = ledger_file(path)
    start = beginning(file)
    if start is not None and not start.startswith(CERTIFICATE_START):
        stream.opened(file)  # a line that is too long is refused before it is in memory
    data = contents(file)
    if data.startswith(CERTIFICATE_START):
        return open_certificate(file, data).ledger
    return parse(file, data, progress=progress)


def streamed(path: str | os.PathLike, *, progress: Progress | None = None) -> Ledger:
    """Check a ledger as `opened` does, but leave its steps in the file: errors in them are raised where they are read.

    A certificate is read whole, since its hash covers all of it. progress: as for `stream.opened`.
    """
    file = ledger_file(path)
    start = beginning(file)
    if start is None or start.startswith(CERTIFICATE_START):
        return read(path, progress=progress)
    return stream.opened(file, progress)


def beginning(file: Path, size: int = 200) -> bytes | None:
    """Return the first bytes of a regular file; None: of a pipe nothing can be read twice. LedgerError: it is gone."""
    with reading(file):
        if file.exists() and not file.is_file():
            return None
        with open_file(file) as opened:
            return opened.read(size)
