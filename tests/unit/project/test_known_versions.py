"""The sets of versions that are known to work: those of the locks are one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tp_invariant_recipes.machine.versions import KNOWN

ROOT = Path(__file__).parents[3]
LOCKS = "\n".join(file.read_text() for file in (ROOT / "scripts" / "lock" / "x86_64").glob("*.txt"))
LOCKED = dict(re.findall(r"^([\w.-]+)==(\S+)", LOCKS, re.MULTILINE))


def test_the_last_set_is_that_of_the_locks():
    assert KNOWN[-1].versions == {name: LOCKED[name] for name in KNOWN[-1].versions}
    assert all(item.evidence for item in KNOWN)


@pytest.mark.release
def test_the_versions_of_the_locks_break_nothing():
    pins = [f"{name}=={LOCKED[name]}" for name in ("megatron-bridge", "megatron-core")]
    command = [sys.executable, str(ROOT / "scripts" / "try-versions"), *pins, "--tests"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "nothing breaks"), done.stdout + done.stderr
