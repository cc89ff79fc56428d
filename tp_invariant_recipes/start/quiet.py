"""Keep the output of third-party packages off the terminal during their import."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

VERBOSE = "TPI_VERBOSE"  # environment variable: set to 1 by -v, and inherited by ranks


@contextmanager
def quiet() -> Iterator[None]:
    """Discard this process's standard output and error for a block, also of C++ libraries, unless -v was given.

    An exception of the block passes on unchanged.
    """
    if os.environ.get(VERBOSE) == "1":
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as sink:
        for descriptor in (1, 2):
            os.dup2(sink.fileno(), descriptor)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, original in zip((1, 2), kept, strict=True):
                os.dup2(original, descriptor)
                os.close(original)
