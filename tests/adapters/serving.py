# SPDX-License-Identifier: Apache-2.0
"""`tpi serve` of a folder, in a process of its own."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TPI = (sys.executable, "-m", "tp_invariant_recipes")


@contextmanager
def served(folder: Path, *words: str, log: Path) -> Iterator[str]:
    """The server's URL, while it runs; afterwards it must have ended well."""
    with log.open("w") as stream:
        process = subprocess.Popen([*TPI, "serve", str(folder), "device=cpu", "--port", "0", *words], stderr=stream)
    try:
        while not (found := re.search(r"(http://\S+): ready", log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        yield found[1]
    finally:
        process.terminate()
        assert process.wait() == 0, log.read_text()
