# SPDX-License-Identifier: Apache-2.0
"""Environment variables: those that numerics depend on, and further ones of a cluster's nodes.

tpi sets them before it imports torch, checks them and records them. One row per variable that numerics depend on. A
value set by the user or the cluster stays if the row accepts it, and is an error otherwise. Some must not be set.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from tp_invariant_recipes.errors import ConfigError, Problem, lines, refuse
from tp_invariant_recipes.numerics.mode import DETERMINISTIC, STOCK
from tp_invariant_recipes.settings import cuda_graphs, secrets
from tp_invariant_recipes.settings.run_config import RunConfig


@dataclass(frozen=True)
class Variable:
    """name=value on these devices; a value of None leaves the variable unset.

    accepted: other valid values. why: the effect of other values on the bits.
    usual:    where torchrun, Megatron or Bridge's recipes set it, too, so that numerics=stock has it by default.
    """

    name: str
    value: str | None
    devices: tuple[str, ...]
    why: str
    accepted: tuple[str, ...] = ()
    usual: tuple[str, ...] = ()


_GPU = ("gpu",)
_CPU = ("cpu",)
_WORKSPACE = "cuBLAS chooses its algorithm by the workspace that it has"
_EMULATED = "cuBLAS would compute a GEMM from parts of its operands"
_NVLS = "in-switch reduction (NVLS) adds in an order of its own"
_ALGORITHM = f"{_NVLS}, and NCCL gathers by no other algorithm than Ring on every machine: a rank would fail"
_MARGIN = "the number of multiprocessors decides how Transformer Engine splits its sums"
_ATTENTION = "each implementation of attention has its own order of sums; choose one by model.attention_backend"
_KERNEL = "another kernel adds in an order of its own"
_TIMED = "torch times algorithms in every process, and takes the fastest"
_THREADS = "the number of threads decides how a CPU splits its sums"
_ROUNDED = "fp32 GEMMs must not round their operands"

ORDERED, ALLOCATOR = "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF"

VARIABLES = (
    Variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8", _GPU, _WORKSPACE),
    Variable("CUBLASLT_WORKSPACE_SIZE", None, _GPU, _WORKSPACE),
    Variable("TORCH_CUBLASLT_UNIFIED_WORKSPACE", None, _GPU, _WORKSPACE),
    Variable("TORCH_BLAS_PREFER_CUBLASLT", "0", _GPU, "cuBLAS and cuBLASLt choose different algorithms"),
    Variable("DISABLE_ADDMM_CUDA_LT", "0", _GPU, "cuBLAS and cuBLASLt choose different algorithms"),
    Variable("CUBLASLT_HEURISTICS_LUT_FILE", None, _GPU, "the file chooses the algorithms of cuBLASLt"),
    Variable("PYTORCH_TUNABLEOP_ENABLED", "0", _GPU, _TIMED),
    Variable("CUBLAS_EMULATE_SINGLE_PRECISION", "0", _GPU, _EMULATED),
    Variable("CUBLAS_EMULATE_DOUBLE_PRECISION", "0", _GPU, _EMULATED),
    Variable("NVIDIA_TF32_OVERRIDE", "0", _GPU, "fp32 GEMMs must not round their operands to TF32"),
    # NVIDIA's images set it to 1, which NVIDIA_TF32_OVERRIDE=0 overrules.
    Variable("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "0", _GPU, _ROUNDED, ("1",)),
    Variable("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", _GPU, "Transformer Engine's attention backward adds atomically"),
    Variable("NVTE_FUSED_ATTN_BACKEND", None, _GPU, _ATTENTION),
    Variable("NVTE_FUSED_ATTN_USE_FAv2_BWD", None, _GPU, _ATTENTION, ("0",)),
    Variable("NVTE_MASKED_SOFTMAX_FUSION", None, _GPU, _ATTENTION, ("1",)),
    Variable("NVTE_FWD_LAYERNORM_SM_MARGIN", None, _GPU, _MARGIN, ("0",)),
    Variable("NVTE_BWD_LAYERNORM_SM_MARGIN", None, _GPU, _MARGIN, ("0",)),
    Variable("NVTE_EXT_MARGIN_SM", None, _GPU, _MARGIN),
    Variable("NVTE_NORM_FWD_USE_CUDNN", None, _GPU, _KERNEL, ("0",)),
    Variable("NVTE_NORM_BWD_USE_CUDNN", None, _GPU, _KERNEL, ("0",)),
    Variable("NVTE_USE_CUTLASS_GROUPED_GEMM", None, _GPU, _KERNEL, ("0",)),
    Variable("NVTE_CUTEDSL_FUSED_GROUPED_MLP", None, _GPU, _KERNEL, ("0",)),
    Variable("TRITON_F32_DEFAULT", None, _GPU, "it decides how Triton's GEMMs round their fp32 operands"),
    Variable("TRITON_DEFAULT_FP_FUSION", None, _GPU, "Triton would round products before it adds them", ("1",)),
    # Bridge's deterministic mode requires it on a CPU, too, where nothing else reads it.
    Variable("NCCL_ALGO", "^NVLS", ("cpu", "gpu"), _ALGORITHM, ("Ring",), usual=_CPU),
    Variable("NCCL_NVLS_ENABLE", "0", _GPU, _NVLS, usual=_GPU),
    Variable("MAMBA_DETERMINISTIC", "1", _GPU, "mamba_ssm times its kernels in every process, and adds atomically"),
    Variable(ORDERED, "1", _GPU, "Megatron orders collectives by launch order", ("8", "32"),
        usual=_GPU),
    Variable("OMP_NUM_THREADS", "1", _CPU, _THREADS, usual=_CPU),
    Variable("MKL_NUM_THREADS", "1", _CPU, _THREADS, usual=_CPU),
    Variable("ONEDNN_DEFAULT_FPMATH_MODE", None, _CPU, _ROUNDED, ("STRICT",)),
    Variable("DNNL_DEFAULT_FPMATH_MODE", None, _CPU, _ROUNDED, ("STRICT",)),
)  # fmt: skip

# Refused by the invariant modes with any other value. Megatron itself sets it on the ranks, so it is not set here.
FLASH = Variable("NVTE_FLASH_ATTN", "0", _GPU, "flash-attn's backward groups sums by the number of heads on a rank")

# Variables with these prefixes are recorded, too, if they are set.
RECORDED_PREFIXES = (
    *("NCCL_", "NVTE_", "CUBLAS_", "CUBLASLT_", "CUDA_", "CUDNN_", "TORCH_", "TORCHDYNAMO_", "PYTORCH_", "ATEN_"),
    *("ONEDNN_", "DNNL_", "OMP_", "MKL_", "MAMBA_", "NVIDIA_TF32"),
)

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def settings(
    device: str,
    environment: Mapping[str, str],
    cluster: Mapping[str, str] | None = None,
    *,
    mode: str = DETERMINISTIC,
) -> dict[str, str]:
    """Return the variables to set for `device` ("cpu" or "gpu"). Values in `environment` win over the cluster's.

    cluster: `cluster.environment`. The result includes its variables without a row in the table.
    mode:    of numerics. Under STOCK any value stands, and only what is usual is set.
    Raises ConfigError listing every variable whose value would change the bits, in the environment or the cluster's.
    """
    cluster = cluster or {}
    if mode == STOCK:
        usual = {v.name: v.value for v in VARIABLES if device in v.usual and v.value is not None}
        return {name: environment.get(name, value) for name, value in (usual | dict(cluster)).items()}
    shell = [
        Problem(f"{v.name}={value} in the environment", v.why, f"unset it{_or_set(v)}")
        for v, value in _refused(device, environment)
    ]
    if wrong := lines([*shell, *changing_bits(device, cluster)]):
        raise ConfigError("\n".join(wrong), wrong)
    wanted = {name: value for name, value in _rows(device, environment).items() if value is not None} | dict(cluster)
    return {name: environment.get(name, value) for name, value in wanted.items()}


def of_run(config: RunConfig) -> dict[str, str]:
    """Return the variables to set for the ranks of a run that this process starts. Raises ConfigError."""
    variables = settings(config.device.kind, os.environ, config.cluster.environment, mode=config.numerics.mode)
    if config.numerics.mode == STOCK and config.device.kind == "gpu" and config.layout.world > 1:
        refuse(lines(_cannot_gather(os.environ.get(_NCCL_ALGO, variables.get(_NCCL_ALGO, "")))))
    asked = ORDERED in os.environ or ORDERED in config.cluster.environment
    # Megatron asks for 1 with tensor or context parallelism alone. The fewer queues a GPU has, the more kernels wait
    # behind one that waits for a collective, such as the sum of gradients that arrive.
    if config.layout.tp * config.layout.cp == 1 and not asked and variables.pop(ORDERED, None) is not None:
        variables |= {} if config.numerics.mode == STOCK else {ORDERED: "32"}
    beside = "Megatron-FSDP moves weights and gradients" if config.fsdp else "the combined schedule moves tokens"
    if (config.fsdp or config.overlaps()) and variables.get(ORDERED) == "1":
        if asked:
            solve = f"{ORDERED}=8 in the environment, or cluster.environment.{ORDERED}=8"
            refuse([f"{ORDERED}=1: {beside} beside what it computes; {solve}"])
        variables[ORDERED] = "8"
    if config.numerics.invariant and config.overlaps() and config.model.get("cuda_graph_impl") == cuda_graphs.FULL:
        # Else memory that two streams have used is not used again before the capture ends.
        asked_of_it = os.environ.get(ALLOCATOR, variables.get(ALLOCATOR))
        variables[ALLOCATOR] = ",".join(filter(None, [asked_of_it, "graph_capture_record_stream_reuse:True"]))
    return variables


_NCCL_ALGO = "NCCL_ALGO"
# NCCL's algorithms -> whether they gather and reduce-scatter; the others all-reduce alone.
_ALGORITHMS = {
    **dict.fromkeys(("ring", "collnetdirect", "nvls", "pat"), True),
    **dict.fromkeys(("tree", "collnetchain", "nvlstree"), False),
}


def chosen(config: RunConfig) -> list[str]:
    """Return what the user's environment sets of VARIABLES where stock would set nothing: ["NAME=value"].

    These variables make stock's kernels deterministic, and slower.
    """
    device, present = config.device.kind, dict(config.cluster.environment) | os.environ
    names = [v.name for v in VARIABLES if device in v.devices and device not in v.usual]
    return [f"{name}={present[name]}" for name in names if name in present]


def _cannot_gather(value: str) -> Iterator[Problem]:
    """Yield why a rank would fail with these algorithms: "Tree", "^Ring,NVLS", "allgather:tree;allreduce:ring"."""
    for part in value.lower().split(";"):
        function, _, names = part.rpartition(":")
        listed = {name.strip() for name in names.removeprefix("^").split(",")}
        left = set(_ALGORITHMS) - listed if names.startswith("^") else listed
        if function in ("", "allgather", "reducescatter") and left and not any(_ALGORITHMS.get(n, True) for n in left):
            text = f"NCCL does not gather by {', '.join(sorted(left))}: a rank would fail"
            yield Problem(f"{_NCCL_ALGO}={value}", text, f"{_NCCL_ALGO}=allreduce:{value}, or unset it")


@contextmanager
def applied(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables in the block: other runs of this process may need others."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def flash_problems(device: str, invariant: bool, environment: Mapping[str, str]) -> list[Problem]:
    """Return what is wrong with asking for flash-attn by the environment, with invariant numerics."""
    value = environment.get(FLASH.name, FLASH.value)
    if not invariant or value == FLASH.value:
        return []
    key = f"{FLASH.name}={value} in the environment"
    if device not in FLASH.devices:
        return [Problem(key, f"nothing reads it with device={device}", "unset it")]
    return [Problem(key, FLASH.why, f"unset it or set {FLASH.name}={FLASH.value}, or numerics=stock")]


def recorded(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a run directory and a ledger record.

    Only names listed here qualify, so never a secret.
    """
    names = {v.name for v in VARIABLES}
    kept = {k: v for k, v in environment.items() if k in names or k.startswith(RECORDED_PREFIXES)}
    return dict(sorted((k, v) for k, v in kept.items() if not (secrets.named(k) or secrets.holds(v))))


def _rows(device: str, environment: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables of the table for `device`: name -> the user's value, or the table's."""
    return {v.name: environment.get(v.name, v.value) for v in VARIABLES if device in v.devices}


def _or_set(variable: Variable, prefix: str = "") -> str:
    """Return a value that does no harm. What a recipe sets cannot be left out, but can be set."""
    value = next((value for value in (variable.value, *variable.accepted) if value is not None), None)
    return "" if value is None else f" or set {prefix}{variable.name}={value}"


def _refused(device: str, environment: Mapping[str, str]) -> list[tuple[Variable, str]]:
    """(row, value) for the rows of `device` whose variable has a value that would change the bits."""
    settings = ((v, environment[v.name]) for v in VARIABLES if device in v.devices and v.name in environment)
    return [(v, value) for v, value in settings if value not in (v.value, *v.accepted)]


def changing_bits(device: str, cluster: Mapping[str, str]) -> list[Problem]:
    """Return what is wrong with the variables of a cluster that numerics depend on."""
    return [
        Problem(f"cluster.environment.{v.name}={value}", v.why, f"leave it out{_or_set(v, 'cluster.environment.')}")
        for v, value in _refused(device, cluster)
    ]
