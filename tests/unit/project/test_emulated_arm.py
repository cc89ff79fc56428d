"""The definition on an emulated Arm processor (scripts/emulate-arm), where somebody has made one in build/arm."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EMULATED = ROOT / "build" / "arm"

pytestmark = [
    pytest.mark.release,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        shutil.which("qemu-aarch64-static") is None or not (EMULATED / "site").is_dir(),
        reason="no emulated Arm processor: scripts/emulate-arm make build/arm",
    ),
]


def inside(*command: str) -> str:
    run = [ROOT / "scripts/emulate-arm", "run", EMULATED, *command]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout


def test_it_is_an_arm_processor():
    assert inside("uname", "-m") == "aarch64\n"


def test_it_adds_as_an_h200_does():
    message = inside("python3", "-m", "tp_invariant_recipes", "conformance")
    assert message.startswith("this CPU (aarch64) adds as an H200 does: all bits of ")


def test_its_functions_have_the_bits_of_the_definition():
    """The samples and cases that a rank of `portable` computes before its first step."""
    inside("python3", "-c", "from tp_invariant_recipes.portable.definition import require_conformance as r; r(None)")
