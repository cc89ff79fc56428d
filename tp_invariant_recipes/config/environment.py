"""Environment variables: those that numerics depend on, and further ones of a cluster's nodes.

tpi sets them before it imports torch, checks them and records them. One row per variable that numerics depend on. A
value set by the user or the cluster stays if the row accepts it, and is an error otherwise.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tp_invariant_recipes.errors import ConfigError


@dataclass(frozen=True)
class Variable:
    """name=value on these devices.

    accepted: other valid values. why: the effect of other values on the bits.
    """

    name: str
    value: str
    devices: tuple[str, ...]
    why: str
    accepted: tuple[str, ...] = ()


_GPU = ("gpu",)
_BOTH = ("cpu", "gpu")

VARIABLES = (
    Variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8", _GPU, "cuBLAS repeats sums only in a fixed workspace", (":16:8",)),
    Variable("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", _GPU, "Transformer Engine's attention backward adds atomically"),
    Variable(
        "NCCL_ALGO",
        "^NVLS",
        _BOTH,  # Bridge's deterministic mode requires it on a CPU, too
        "in-switch reduction (NVLS) adds in an order of its own",
        ("Ring", "Tree", "CollnetDirect", "CollnetChain"),
    ),
    Variable("NCCL_NVLS_ENABLE", "0", _GPU, "in-switch reduction (NVLS) adds in an order of its own"),
    Variable("MAMBA_DETERMINISTIC", "1", _GPU, "mamba_ssm times its kernels in every process, and adds atomically"),
    Variable("NVIDIA_TF32_OVERRIDE", "0", _GPU, "fp32 products must not round their inputs to TF32"),
    Variable("CUDA_DEVICE_MAX_CONNECTIONS", "1", _GPU, "Megatron orders collectives by launch order", ("8", "32")),
    Variable("OMP_NUM_THREADS", "1", ("cpu",), "the number of threads decides how a CPU splits its sums"),
    Variable("MKL_NUM_THREADS", "1", ("cpu",), "the number of threads decides how a CPU splits its sums"),
)  # fmt: skip

# Variables with these prefixes are recorded, too, if they are set.
RECORDED_PREFIXES = (
    "NCCL_",
    "NVTE_",
    "CUBLAS_",
    "CUDA_",
    "CUDNN_",
    "TORCH_",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "MAMBA_",
    "NVIDIA_TF32",
)

# A name with one of these words is never recorded, with any prefix, and is not allowed for a cluster's variable.
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
# Harmless words that contain one of them: TOKENIZERS_PARALLELISM, NUM_OF_TOKENS_PER_CHUNK_COMBINE_API.
NOT_SECRET = ("TOKENIZER", "TOKENS_PER")

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def settings(device: str, environment: Mapping[str, str], cluster: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables to set for `device` ("cpu" or "gpu"). Values in `environment` win over the cluster's.

    cluster: `cluster.environment`. The result includes its variables without a row in the table.
    Raises ConfigError listing every variable whose value would change the bits, in the environment or the cluster's.
    """
    cluster = cluster or {}
    shell = [
        f"{v.name}={value} in the environment: {v.why}; unset it or set {v.name}={v.value}"
        for v, value in _refused(device, environment)
    ]
    if wrong := [*shell, *_changing_bits(device, cluster)]:
        raise ConfigError("\n".join(wrong), wrong)
    wanted = {v.name: v.value for v in VARIABLES if device in v.devices} | dict(cluster)
    return {name: environment.get(name, value) for name, value in wanted.items()}


def problems(tree: dict[str, Any]) -> list[str]:
    """All problems of the cluster's variables in a composed tree. It never shows the value of a secret."""
    cluster = tree["cluster"]["environment"]
    names = [f"cluster.environment: {name!r} is no name of a variable" for name in cluster if not NAME.fullmatch(name)]
    secrets = [
        f"cluster.environment.{name}: looks like a secret, and what is configured is written down; set it where you "
        f"start the run, and for a job name it in cluster.forward"
        for name in cluster
        if is_secret(name)
    ]
    return [*names, *secrets, *_changing_bits(tree["device"]["kind"], cluster)]


def recorded(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a run directory and a ledger record. Only names listed here qualify, so never a secret."""
    names = {v.name for v in VARIABLES}
    kept = {k: v for k, v in environment.items() if k in names or k.startswith(RECORDED_PREFIXES)}
    return dict(sorted((k, v) for k, v in kept.items() if not is_secret(k)))


def is_secret(name: str) -> bool:
    """Whether a variable of this name may hold a secret."""
    rest = name.upper()
    for word in NOT_SECRET:
        rest = rest.replace(word, "")
    return any(word in rest for word in SECRET_WORDS)


def _refused(device: str, environment: Mapping[str, str]) -> list[tuple[Variable, str]]:
    """(row, value) for the rows of `device` whose variable has a value that would change the bits."""
    found = ((v, environment[v.name]) for v in VARIABLES if device in v.devices and v.name in environment)
    return [(v, value) for v, value in found if value not in (v.value, *v.accepted)]


def _changing_bits(device: str, cluster: Mapping[str, str]) -> list[str]:
    return [
        f"cluster.environment.{v.name}={value}: {v.why}; leave it out or set cluster.environment.{v.name}={v.value}"
        for v, value in _refused(device, cluster)
    ]
