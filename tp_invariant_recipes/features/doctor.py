"""The parts that a machine has and lacks for training, as rows of a table."""

import platform
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from tp_invariant_recipes.files import free_bytes
from tp_invariant_recipes.foreign_text import single_line
from tp_invariant_recipes.machine import gpus, known_versions
from tp_invariant_recipes.machine.versions import installed
from tp_invariant_recipes.settings import conf_files
from tp_invariant_recipes.start import bytecode


@dataclass(frozen=True)
class Finding:
    """One row.

    state: ok, missing (needed here), other (a version nobody has tried), optional (absent, not needed), refused (of a
           patch: needed by this version, whose code it does not know).
    """

    what: str
    present: str | None
    state: str
    advice: str

    def as_json(self) -> dict[str, Any]:
        """Return the row as `tpi doctor --json` prints it."""
        return {"found" if name == "present" else name: value for name, value in vars(self).items()}


@dataclass(frozen=True)
class PatchFinding(Finding):
    """A fix to an installed package. present: its state on this machine; advice: the defect without it.

    reason:   the reason of that state.
    versions: the package's versions that need it.
    upstream: address of the upstream fix or of its discussion.
    """

    reason: str
    versions: str
    upstream: str | None


@dataclass(frozen=True)
class Needed:
    """A distribution that training imports, whether only training on GPUs does, and how to get it.

    conditional: whether only some runs do.
    """

    distribution: str
    gpu_only: bool
    advice: str
    conditional: bool = False


# What `make gpu` expects of the machine (docs/install.md). The CUDA compiler is not among it: scripts/lock has one.
GPU_NEEDS = ("a driver for CUDA 13", "g++", "Python's headers")

CPU_LOCK = "make bootstrap (the versions in scripts/lock work together; a plain pip install backtracks)"
ARITHMETIC = "tpi conformance lists the bits; docs/arithmetic.md says what follows"
GPU_LOCK = f"make gpu (needs {', '.join(GPU_NEEDS)}; the lock brings the CUDA compiler), or an NVIDIA container"

NEEDED = (
    Needed("torch", False, CPU_LOCK),
    Needed("megatron-bridge", False, CPU_LOCK),
    Needed("megatron-core", False, CPU_LOCK),
    Needed("transformers", False, CPU_LOCK),
    Needed("nvidia-resiliency-ext", False, CPU_LOCK),
    Needed("emerging-optimizers", False, f"optimizer.optimizer=muon; {CPU_LOCK}", conditional=True),
    Needed("transformer-engine", True, GPU_LOCK),
    Needed("causal-conv1d", True, f"Nemotron's Mamba layers; {GPU_LOCK}"),
    Needed("mamba-ssm", True, f"Nemotron's Mamba layers; {GPU_LOCK}"),
)


def proven() -> dict[str, str]:
    """Distribution -> the version that pyproject.toml pins in its extras `megatron` and `gpu`; {} if not installed."""
    try:
        lines = requires("tp-invariant-recipes") or []
    except PackageNotFoundError:
        return {}
    pins = {}
    for requirement in map(Requirement, lines):
        extras = ("megatron", "gpu")
        if requirement.marker and any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            (pin,) = requirement.specifier
            pins[requirement.name] = pin.version
    return pins


def examine() -> list[Finding]:
    """Examine this machine without heavy imports."""
    visible = gpus.visible()
    pins = proven()
    compiler = shutil.which("cc") or shutil.which("gcc")
    for_triton = "Triton builds its launcher with it on a GPU"
    return [
        Finding("Python", platform.python_version(), "ok" if sys.version_info[:2] == (3, 12) else "missing", "3.12"),
        *(_package(needed, pins.get(needed.distribution), has_gpu=bool(visible)) for needed in NEEDED),
        *_known(),
        *_gpus(visible),
        Finding("C compiler", compiler, "ok" if compiler else "optional", for_triton),
        _bytecode(),
        Finding(
            "free disk here", f"{free_bytes(Path.cwd()) / 2**30:.1f} GiB", "ok", "runs go to ./runs (run.dir=PATH)"
        ),
        *_patches(),
    ]


def _package(needed: Needed, pin: str | None, *, has_gpu: bool) -> Finding:
    version = installed(needed.distribution)
    if version is None:
        state = "optional" if needed.conditional or (needed.gpu_only and not has_gpu) else "missing"
        return Finding(needed.distribution, None, state, needed.advice)
    if version.split("+")[0] == pin:
        return Finding(needed.distribution, version, "ok", "")
    advice = f"{pin} is proven with the rest" if pin else "tp-invariant-recipes, which knows, is not installed"
    return Finding(needed.distribution, version, "other", advice)


def _known() -> list[Finding]:
    """Return the sets that are known to work, each with its evidence, and whether one is here."""
    here = known_versions.matching(installed)
    rows = []
    for known in known_versions.KNOWN:
        words = ", ".join(f"{name} {version}" for name, version in known.versions.items())
        rows.append(Finding("known to work", words, "ok" if known is here else "optional", known.evidence))
    if here is None and installed("megatron-bridge") is not None:
        rows.append(Finding("these together", "in no such set", "other", "scripts/try-versions shows what breaks"))
    return rows


def _gpus(visible: list[gpus.Gpu]) -> list[Finding]:
    if not visible:
        small = [model for model in conf_files.groups()["model"] if model.endswith("_toy")]  # the others take days
        advice = f"device=cpu trains {', '.join(small)}; if there are GPUs, nvidia-smi shows the fault"
        return [Finding("GPUs", None, "optional", advice)]
    names = sorted({f"{g.name} (sm_{g.capability[0]}{g.capability[1]}, {g.memory / 2**30:.0f} GiB)" for g in visible})
    return [Finding("GPUs", f"{len(visible)} × {', '.join(names)}", "ok", ""), *_arithmetic(len(visible))]


def _arithmetic(gpu_count: int) -> list[Finding]:
    """Whether each GPU adds products as an H200 does; nothing where torch or Triton is missing, which has its row."""
    try:
        from tp_invariant_recipes.portable import conformance

        built_in, fp8 = conformance.read(), conformance.read(conformance.FP8)
        wrong, other_fp8 = (
            [gpu for gpu in range(gpu_count) if conformance.differences(recording, conformance.on_gpu(gpu))]
            for recording in (built_in, fp8)
        )
    except ImportError:
        return []
    except (AssertionError, RuntimeError) as error:  # a torch without CUDA, a driver too old, a GPU in use by others
        return [Finding("arithmetic", None, "other", f"could not be checked: {single_line(str(error))}")]
    if wrong:
        return [Finding("arithmetic", f"GPU {', '.join(map(str, wrong))} adds in another way", "other", ARITHMETIC)]
    detail = f"as an H200 ({len(built_in.cases) + len(fp8.cases)} cases)"
    if other_fp8:
        detail = (
            f"as an H200 ({len(built_in.cases)} cases), but GPU {', '.join(map(str, other_fp8))} adds FP8 otherwise"
        )
    return [Finding("arithmetic", detail, "ok", "")]


def _bytecode() -> Finding:
    lacking = bytecode.packages_without_bytecode()
    if not lacking:
        return Finding("bytecode", "kept", "ok", "")
    if (folder := bytecode.keep()) is not None:
        return Finding("bytecode", f"kept in {folder}", "ok", "")
    advice = (
        f"every start compiles {', '.join(lacking)} again, about 8 s: unset PYTHONDONTWRITEBYTECODE, and make their "
        "folders writable or run python -m compileall there once"
    )
    return Finding("bytecode", None, "optional", advice)


def _patches() -> list[PatchFinding]:
    if installed("megatron-core") is None:
        return []
    from tp_invariant_recipes.patches import registry

    return [
        PatchFinding(
            what=f"patch {patch.name}",
            present=verdict.state,
            state="refused" if verdict.state == "refused" else "ok",
            advice=patch.why,
            reason=verdict.reason,
            versions=f"{patch.package} {patch.need.versions}",
            upstream=patch.upstream,
        )
        for patch, verdict in registry.verdicts()
    ]
