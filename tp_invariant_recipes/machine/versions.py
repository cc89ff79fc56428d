# SPDX-License-Identifier: Apache-2.0
"""Versions of the software that computes, read from package metadata without heavy imports."""

import platform
import re
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import tp_invariant_recipes

# Label -> distribution.
PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "transformer_engine": "transformer-engine",
    "megatron_core": "megatron-core",
    "megatron_bridge": "megatron-bridge",
    "cuda_runtime": "nvidia-cuda-runtime",
    "cublas": "nvidia-cublas",
    "cudnn": "nvidia-cudnn-cu13",
    "nccl": "nvidia-nccl-cu13",
    "numpy": "numpy",
    "transformers": "transformers",
    "hydra": "hydra-core",
    "emerging_optimizers": "emerging-optimizers",
    "causal_conv1d": "causal-conv1d",
    "mamba_ssm": "mamba-ssm",
    "wandb": "wandb",
}


@cache
def installed(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def lock_dir() -> Path:
    """Return the folder of this architecture's locks: in a wheel inside the package, in a checkout in `scripts/`."""
    package = Path(tp_invariant_recipes.__file__).parent
    inside = package / "lock"
    return (inside if inside.is_dir() else package.parent / "scripts" / "lock") / platform.machine()


@cache
def pinned() -> dict[str, str]:
    """Distribution -> the version that the locks have; {} on an architecture without locks."""
    text = "".join(file.read_text() for file in sorted(lock_dir().glob("*.txt")))
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def versions() -> dict[str, str | None]:
    """Label -> version; None: not installed."""
    packages = {label: installed(distribution) for label, distribution in PACKAGES.items()}
    return {
        "python": sys.version.split()[0],
        "tp_invariant_recipes": tp_invariant_recipes.__version__,
        "git_commit": _git_commit(),
        **packages,
    }


@cache
def _git_commit() -> str | None:
    """Return the commit of this package's checkout, with "+dirty" for local changes; None: not a checkout."""
    checkout = Path(tp_invariant_recipes.__file__).parents[1]
    if not (checkout / ".git").exists():
        return None
    try:
        head = _git(checkout, "rev-parse", "HEAD")
        return head + ("+dirty" if _git(checkout, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(checkout: Path, *arguments: str) -> str:
    command = ["git", "-C", str(checkout), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
