# SPDX-License-Identifier: Apache-2.0
"""Open a ledger in a run directory, in a separate file or in a certificate."""

import os
from dataclasses import replace

from tp_invariant_recipes.ledger import stream
from tp_invariant_recipes.ledger.certificate import open_certificate
from tp_invariant_recipes.ledger.reader import CERTIFICATE_START, Ledger, Progress, contents, ledger_file, reading
from tp_invariant_recipes.reading import open_file


def read(path: str | os.PathLike, *, progress: Progress | None = None) -> Ledger:
    """Read and check the ledger of a run directory, a ledger file, or the ledger in a certificate.

    LedgerError, naming the file and the line: it is missing or unreadable, not a ledger, was altered, or a step is
    missing, repeated or out of order. Only a torn last line is no error, since a killed run leaves one.
    progress: as for `StepsInFile.all`; a certificate's ledger is read without.
    """
    ledger = streamed(path)
    return replace(ledger, steps=ledger.steps.all(progress)) if isinstance(ledger.steps, stream.StepsInFile) else ledger


def streamed(path: str | os.PathLike, *, progress: Progress | None = None) -> Ledger:
    """Check a ledger as `opened` does, but leave its steps in the file: errors in them are raised where they are read.

    A certificate is read whole, since its hash covers all of it; so is a pipe, which nobody can read twice.
    progress: as for `stream.opened`.
    """
    file = ledger_file(path)
    start = None
    with reading(file):
        if file.is_file() or not file.exists():
            with open_file(file) as opened:
                start = opened.read(len(CERTIFICATE_START))
    if start not in (None, CERTIFICATE_START):
        return stream.opened(file, progress)
    data = contents(file)
    return open_certificate(file, data).ledger if data.startswith(CERTIFICATE_START) else stream.parse(file, data)
