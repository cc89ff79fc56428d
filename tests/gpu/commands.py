# SPDX-License-Identifier: Apache-2.0
"""One command in a process of its own, in a folder of runs, and what a training wrote there."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """This process's, from which `tests` can be imported in any folder."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def tpi(folder: Path, *arguments: str, module: str = "tp_invariant_recipes") -> subprocess.CompletedProcess:
    """Run `tpi ARGUMENTS`. module: what starts it."""
    words = [sys.executable, "-m", module, *arguments]
    return subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True)


def steps(folder: Path, run: str) -> list[bytes]:
    """The lines of a ledger below its header."""
    return (folder / run / "ledger.jsonl").read_bytes().split(b"\n")[1:]
