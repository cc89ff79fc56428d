# SPDX-License-Identifier: Apache-2.0
"""The table of environment variables: set, kept where as good, refused where the bits would change, recorded."""

import os

import pytest

from tp_invariant_recipes import patch_mode
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.numerics.mode import STOCK
from tp_invariant_recipes.numerics.settings import NumericsSettings
from tp_invariant_recipes.settings import environment
from tp_invariant_recipes.settings.environment import VARIABLES, applied, of_run, recorded, settings

DEFAULTS = {
    "gpu": {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCH_BLAS_PREFER_CUBLASLT": "0", "DISABLE_ADDMM_CUDA_LT": "0",
        "PYTORCH_TUNABLEOP_ENABLED": "0", "CUBLAS_EMULATE_SINGLE_PRECISION": "0",
        "CUBLAS_EMULATE_DOUBLE_PRECISION": "0", "NVIDIA_TF32_OVERRIDE": "0", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "^NVLS", "NCCL_NVLS_ENABLE": "0",
        "MAMBA_DETERMINISTIC": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    },
    "cpu": {"NCCL_ALGO": "^NVLS", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
}  # fmt: skip
# Variables that must not be set, and the value that does as well, if there is one.
UNSET = {
    "gpu": {
        "CUBLASLT_WORKSPACE_SIZE": None, "TORCH_CUBLASLT_UNIFIED_WORKSPACE": None,
        "CUBLASLT_HEURISTICS_LUT_FILE": None, "NVTE_FUSED_ATTN_BACKEND": None, "NVTE_FUSED_ATTN_USE_FAv2_BWD": "0",
        "NVTE_MASKED_SOFTMAX_FUSION": "1", "NVTE_FWD_LAYERNORM_SM_MARGIN": "0", "NVTE_BWD_LAYERNORM_SM_MARGIN": "0",
        "NVTE_EXT_MARGIN_SM": None, "NVTE_NORM_FWD_USE_CUDNN": "0", "NVTE_NORM_BWD_USE_CUDNN": "0",
        "NVTE_USE_CUTLASS_GROUPED_GEMM": "0", "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "0", "TRITON_F32_DEFAULT": None,
        "TRITON_DEFAULT_FP_FUSION": "1",
    },
    "cpu": {"ONEDNN_DEFAULT_FPMATH_MODE": "STRICT", "DNNL_DEFAULT_FPMATH_MODE": "STRICT"},
}  # fmt: skip
ROWS = [(device, variable) for variable in VARIABLES for device in variable.devices]
IDS = [f"{device} {variable.name}" for device, variable in ROWS]


@pytest.mark.parametrize("device", DEFAULTS)
def test_where_nothing_is_set_the_table_sets_it(device):
    assert settings(device, {"HOME": "/root"}) == DEFAULTS[device]


@pytest.mark.parametrize("device, variable", ROWS, ids=IDS)
def test_a_value_that_does_as_well_is_kept(device, variable):
    for value in (variable.value, *variable.accepted):
        if value is not None:
            assert settings(device, {variable.name: value}) == DEFAULTS[device] | {variable.name: value}


@pytest.mark.parametrize("device, variable", ROWS, ids=IDS)
@pytest.mark.parametrize("of_cluster", (False, True))
def test_any_other_value_is_refused_by_name(device, variable, of_cluster):
    prefix, how = ("cluster.environment.", "leave it out") if of_cluster else ("", "unset it")
    harmless = next((item for item in (variable.value, *variable.accepted) if item is not None), None)
    remedy = how if harmless is None else f"{how} or set {prefix}{variable.name}={harmless}"
    for value in ("", "wrong", "NVLS", "Tree", "CollnetDirect", ":16:8", f"{variable.value} "):
        wrong, valid = {variable.name: value}, {} if variable.value is None else {variable.name: variable.value}
        with pytest.raises(ConfigError) as error:  # of no effect beside a valid value of the shell, and yet wrong
            settings(device, *((valid, wrong) if of_cluster else (wrong, valid)))
        place = "" if of_cluster else " in the environment"
        assert str(error.value) == f"{prefix}{variable.name}={value}{place}: {variable.why}; {remedy}"


@pytest.mark.parametrize("device", DEFAULTS)
def test_every_wrong_value_is_named_and_no_other(device):
    with pytest.raises(ConfigError) as error:
        settings(device, {variable.name: "wrong" for variable in VARIABLES})
    named = [line.partition("=")[0] for line in str(error.value).splitlines()]
    assert sorted(named) == sorted([*DEFAULTS[device], *UNSET[device]])


# What numerics=stock has by default.
USUAL = {
    "gpu": {"NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    "cpu": {"NCCL_ALGO": "^NVLS", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
}


@pytest.mark.parametrize("device", USUAL)
def test_stock_takes_every_variable_of_the_user(device):
    assert settings(device, {}, mode=STOCK) == USUAL[device]
    theirs = {variable.name: "theirs" for variable in VARIABLES}
    assert settings(device, {}, theirs, mode=STOCK) == theirs
    assert settings(device, theirs, mode=STOCK) == dict.fromkeys(USUAL[device], "theirs")


@pytest.mark.parametrize(
    "words, environment, expected",
    (
        ("numerics=stock tp=2", {}, "1"), ("numerics=stock", {}, None),
        ("numerics=stock", {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, "32"), ("numerics=deterministic", {}, "32"),
        ("numerics=tree", {}, "32"), ("numerics=tree", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "8"),
        ("numerics=tree tp=2", {}, "1"),
        ("numerics=deterministic ledger.digests=0 ddp.use_megatron_fsdp=true", {}, "32"),
        ("numerics=deterministic ledger.digests=0 ddp.use_megatron_fsdp=true tp=2", {}, "8"),
    ),
)  # fmt: skip
def test_collectives_are_ordered_where_megatron_asks(words, environment, expected, monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    variables = of_run(compose("qwen3_toy", words.split(), device="gpu").config)
    assert variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in of_run(compose("qwen3_toy", [], device="cpu").config)


COMBINED = "dp=2 ep=2 gbs=2 cuda_graph=full model.overlap_moe_expert_parallel_comm=true"


def test_the_combined_schedule_has_streams_that_run_side_by_side(monkeypatch):
    """And a graph of it uses memory again that two of them have used, whatever else the allocator was asked for."""
    for name in (environment.ORDERED, environment.ALLOCATOR):
        monkeypatch.delenv(name, raising=False)
    config = compose("qwen3_moe_toy", COMBINED.split(), device="gpu").config
    variables, reuse = of_run(config), "graph_capture_record_stream_reuse:True"
    assert [variables[name] for name in (environment.ORDERED, environment.ALLOCATOR)] == ["32", reuse]
    monkeypatch.setenv(environment.ALLOCATOR, "max_split_size_mb:64")
    assert of_run(config)[environment.ALLOCATOR] == f"max_split_size_mb:64,{reuse}"
    monkeypatch.setenv(environment.ORDERED, "1")
    with pytest.raises(ConfigError, match="moves tokens beside what it computes; CUDA_DEVICE_MAX_CONNECTIONS=8"):
        of_run(config)


def test_the_variables_of_a_run_end_with_it(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.delenv("MAMBA_DETERMINISTIC", raising=False)
    with applied({"NCCL_ALGO": "^NVLS", "MAMBA_DETERMINISTIC": "1"}):
        assert (os.environ["NCCL_ALGO"], os.environ["MAMBA_DETERMINISTIC"]) == ("^NVLS", "1")
    assert (os.environ["NCCL_ALGO"], os.environ.get("MAMBA_DETERMINISTIC")) == ("Ring", None)


@pytest.mark.parametrize("device", UNSET)
def test_a_variable_without_a_name_for_its_default_is_not_set_and_must_not_be(device):
    assert not UNSET[device].keys() & settings(device, {}).keys()
    assert [v.name for v in VARIABLES if device in v.devices and v.value is None] == list(UNSET[device])
    for name, default in UNSET[device].items():
        (row,) = (v for v in VARIABLES if v.name == name)
        assert row.accepted == (() if default is None else (default,))


def test_recorded_are_the_table_and_what_libraries_read_in_order():
    kept = {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0", "TORCH_LOGS": "", "PYTORCH_ALLOC_CONF": "x"}
    everything = settings("gpu", {}) | settings("cpu", {}) | kept
    others = {"HOME": "/root", "PATH": "/bin", "USER": "me", "SSH_AUTH_SOCK": "/tmp/x", "MASTER_ADDR": "host"}
    assert recorded(everything | others) == everything
    assert list(recorded(everything)) == sorted(everything)


@pytest.mark.parametrize("name", ("WANDB_API_KEY", "NCCL_MY_TOKEN", "TORCH_DB_PASS"))  # each name: check/test_secrets
def test_a_secret_is_never_recorded(name):
    secrets = {name: "hunter2", "NCCL_PROXY": "http://u:hunter2@proxy:1"}
    assert recorded(secrets | {"NCCL_DEBUG": "INFO"}) == {"NCCL_DEBUG": "INFO"}


def test_the_switch_of_other_programs_refuses_flash_attn(monkeypatch):
    monkeypatch.setattr(patch_mode, "_device", lambda: "gpu")
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    with pytest.raises(
        ConfigError, match=r"NVTE_TP_INVARIANT_MODE=1 does not cover this:\n  - NVTE_FLASH_ATTN=1 in the"
    ):
        patch_mode.install(NumericsSettings("tree", 8))


@pytest.mark.parametrize(
    "value", ("Tree", "tree,nvlstree", "^Ring,NVLS,CollnetDirect,PAT", "allgather:tree;allreduce:ring")
)
def test_stock_refuses_algorithms_that_do_not_gather(monkeypatch, value):
    monkeypatch.setenv("NCCL_ALGO", value)
    stock = compose("qwen3_toy", ["tp=2", "numerics=stock"], device="gpu").config
    with pytest.raises(ConfigError, match=r"NCCL does not gather by (collnetchain, nvlstree, |nvlstree, )?tree"):
        of_run(stock)
    of_run(compose("qwen3_toy", ["numerics=stock"], device="gpu").config)  # one rank gathers nothing


@pytest.mark.parametrize("value", ("Ring", "Tree,Ring", "^Tree", "^NVLS", "allreduce:tree", "NVLS", ""))
def test_stock_takes_algorithms_that_gather(monkeypatch, value):
    monkeypatch.setenv("NCCL_ALGO", value)
    of_run(compose("qwen3_toy", ["tp=2", "numerics=stock"], device="gpu").config)
