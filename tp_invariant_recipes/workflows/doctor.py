"""What a machine has and lacks for training, as rows of a table."""

import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from tp_invariant_recipes.host import gpus
from tp_invariant_recipes.host.versions import installed
from tp_invariant_recipes.runs.run_dir import free_bytes


@dataclass(frozen=True)
class Finding:
    """One row.

    state: ok, missing (needed here), other (a version nobody has tried), optional (absent, not needed), refused (of a
           patch: needed by this version, whose code it does not know).
    """

    what: str
    found: str | None
    state: str
    advice: str


@dataclass(frozen=True)
class PatchFinding(Finding):
    """A fix to an installed package. found: what becomes of it here; advice: what goes wrong without it.

    reason:   why that becomes of it.
    versions: of the package, that need it.
    upstream: the change that makes it unnecessary, or where that is discussed.
    """

    reason: str
    versions: str
    upstream: str | None


@dataclass(frozen=True)
class Requirement:
    """A distribution, the version proven to work with the others, whether it needs a GPU, and how to get it."""

    distribution: str
    proven: str
    gpu_only: bool
    advice: str


CPU_LOCK = "make bootstrap (the versions in scripts/lock work together; a plain pip install backtracks)"
GPU_LOCK = "make gpu on a machine with the CUDA 13 toolkit, or an NGC container"

REQUIREMENTS = (
    Requirement("torch", "2.11.0", False, CPU_LOCK),
    Requirement("megatron-bridge", "0.6.2", False, CPU_LOCK),
    Requirement("megatron-core", "0.19.2", False, CPU_LOCK),
    Requirement("transformers", "5.12.1", False, CPU_LOCK),
    Requirement("nvidia-resiliency-ext", "0.6.0", False, CPU_LOCK),
    Requirement("transformer-engine", "2.20.2", True, GPU_LOCK),
    Requirement("causal-conv1d", "1.6.2.post1", True, f"Nemotron's Mamba layers; {GPU_LOCK}"),
    Requirement("mamba-ssm", "2.3.2.post1", True, f"Nemotron's Mamba layers; {GPU_LOCK}"),
)


def examine() -> list[Finding]:
    """Look at this machine. Imports nothing heavy."""
    found = gpus.visible()
    return [
        Finding("Python", platform.python_version(), "ok" if sys.version_info[:2] == (3, 12) else "missing", "3.12"),
        *(_package(r, has_gpu=bool(found)) for r in REQUIREMENTS),
        *_gpus(found),
        _compiler(),
        Finding(
            "free disk here", f"{free_bytes(Path.cwd()) / 2**30:.1f} GiB", "ok", "runs go to ./runs (run.dir=PATH)"
        ),
        *_patches(),
    ]


def _package(requirement: Requirement, *, has_gpu: bool) -> Finding:
    version = installed(requirement.distribution)
    if version is None:
        needed = has_gpu or not requirement.gpu_only
        return Finding(requirement.distribution, None, "missing" if needed else "optional", requirement.advice)
    if version.split("+")[0] == requirement.proven:
        return Finding(requirement.distribution, version, "ok", "")
    return Finding(requirement.distribution, version, "other", f"{requirement.proven} is proven with the rest")


def _gpus(found: list[gpus.Gpu]) -> list[Finding]:
    if not found:
        return [
            Finding(
                "GPUs",
                None,
                "optional",
                "the toy Qwen3 models train on the CPU; nvidia-smi shows why if there are GPUs",
            )
        ]
    names = sorted({f"{g.name} (sm_{g.capability[0]}{g.capability[1]}, {g.memory / 2**30:.0f} GiB)" for g in found})
    return [Finding("GPUs", f"{len(found)} × {', '.join(names)}", "ok", "")]


def _compiler() -> Finding:
    path = shutil.which("cc") or shutil.which("gcc")
    return Finding("C compiler", path, "ok" if path else "optional", "Triton builds its launcher with it on a GPU")


def _patches() -> list[PatchFinding]:
    if installed("megatron-core") is None:
        return []
    from tp_invariant_recipes.patches import registry

    return [
        PatchFinding(
            what=f"patch {patch.name}",
            found=verdict.state,
            state="refused" if verdict.state == "refused" else "ok",
            advice=patch.why,
            reason=verdict.reason,
            versions=f"{patch.package} {patch.need.versions}",
            upstream=patch.upstream,
        )
        for patch, verdict in registry.verdicts()
    ]
