"""Environment variables that numerics depend on: set before torch is imported, checked, and recorded.

One row a variable. A value that the user has set is kept if it is one the row accepts, and is an error otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tp_invariant_recipes.errors import ConfigError


@dataclass(frozen=True)
class Variable:
    """name=value on these devices.

    accepted: other values that do as well. why: what would change the bits otherwise.
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
        _BOTH,  # Bridge's deterministic mode asks for it on a CPU too
        "in-switch reduction (NVLS) adds in an order of its own",
        ("Ring", "Tree", "CollnetDirect", "CollnetChain"),
    ),
    Variable("NCCL_NVLS_ENABLE", "0", _GPU, "in-switch reduction (NVLS) adds in an order of its own"),
    Variable("NVIDIA_TF32_OVERRIDE", "0", _GPU, "fp32 products must not round their inputs to TF32"),
    Variable("CUDA_DEVICE_MAX_CONNECTIONS", "1", _GPU, "Megatron orders collectives by launch order", ("8", "32")),
    Variable("OMP_NUM_THREADS", "1", ("cpu",), "the number of threads decides how a CPU splits its sums"),
    Variable("MKL_NUM_THREADS", "1", ("cpu",), "the number of threads decides how a CPU splits its sums"),
)  # fmt: skip

# Recorded where set, beside the table's own.
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
    "NVIDIA_TF32",
)

# A name with one of these words is never recorded, whatever its prefix.
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")


def settings(device: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to set for `device` ("cpu" or "gpu"), given what is set already.

    Raises ConfigError listing every variable whose value would change the bits.
    """
    rows = [v for v in VARIABLES if device in v.devices]
    wrong = [
        f"{v.name}={environment[v.name]} in the environment: {v.why}; unset it or set {v.name}={v.value}"
        for v in rows
        if v.name in environment and environment[v.name] not in (v.value, *v.accepted)
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))
    return {v.name: environment.get(v.name, v.value) for v in rows}


def recorded(environment: Mapping[str, str]) -> dict[str, str]:
    """What a run directory and a ledger keep of the environment. Never a secret: only names listed here."""
    names = {v.name for v in VARIABLES}
    kept = {k: v for k, v in environment.items() if k in names or k.startswith(RECORDED_PREFIXES)}
    return dict(sorted((k, v) for k, v in kept.items() if not any(word in k for word in SECRET_WORDS)))
