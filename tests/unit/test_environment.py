"""The table of environment variables: set, kept where as good, refused where the bits would change, recorded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp_invariant_recipes.config.environment import VARIABLES, recorded, settings
from tp_invariant_recipes.errors import ConfigError

DEFAULTS = {
    "gpu": {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "NCCL_ALGO": "^NVLS",
        "NCCL_NVLS_ENABLE": "0",
        "MAMBA_DETERMINISTIC": "1",
        "NVIDIA_TF32_OVERRIDE": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    },
    "cpu": {"NCCL_ALGO": "^NVLS", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
}
ROWS = [(device, variable) for variable in VARIABLES for device in variable.devices]
IDS = [f"{device} {variable.name}" for device, variable in ROWS]


@pytest.mark.parametrize("device", DEFAULTS)
def test_where_nothing_is_set_the_table_sets_it(device):
    assert settings(device, {"HOME": "/root"}) == DEFAULTS[device]


@pytest.mark.parametrize("device, variable", ROWS, ids=IDS)
def test_a_value_that_does_as_well_is_kept(device, variable):
    for value in (variable.value, *variable.accepted):
        assert settings(device, {variable.name: value}) == DEFAULTS[device] | {variable.name: value}


@pytest.mark.parametrize("device, variable", ROWS, ids=IDS)
def test_any_other_value_is_refused_by_name(device, variable):
    for value in ("", "wrong", "NVLS", f"{variable.value} "):
        with pytest.raises(ConfigError) as error:
            settings(device, {variable.name: value})
        (line,) = str(error.value).splitlines()
        assert line.startswith(f"{variable.name}={value} in the environment: {variable.why}; unset it or set")
        assert line.endswith(f"{variable.name}={variable.value}")


@pytest.mark.parametrize("device", DEFAULTS)
def test_every_wrong_value_is_named_and_no_other(device):
    wrong = {variable.name: "wrong" for variable in VARIABLES}
    with pytest.raises(ConfigError) as error:
        settings(device, wrong)
    assert [line.partition("=")[0] for line in str(error.value).splitlines()] == list(DEFAULTS[device])


def test_a_variable_of_the_other_device_is_left_alone():
    assert "OMP_NUM_THREADS" not in settings("gpu", {"OMP_NUM_THREADS": "64"})
    assert "NVIDIA_TF32_OVERRIDE" not in settings("cpu", {"NVIDIA_TF32_OVERRIDE": "1"})


def test_what_was_set_is_accepted_the_next_time():
    for device in DEFAULTS:
        first = settings(device, {})
        assert settings(device, first) == first


def test_recorded_are_the_table_and_what_libraries_read_in_order():
    kept = {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0", "TORCH_LOGS": "", "PYTORCH_ALLOC_CONF": "x"}
    everything = settings("gpu", {}) | settings("cpu", {}) | kept
    others = {"HOME": "/root", "PATH": "/bin", "USER": "me", "SSH_AUTH_SOCK": "/tmp/x", "MASTER_ADDR": "host"}
    assert recorded(everything | others) == everything
    assert list(recorded(everything)) == sorted(everything)


@pytest.mark.parametrize(
    "name",
    (
        "WANDB_API_KEY",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "NVIDIA_API_KEY",
        "NCCL_MY_TOKEN",
        "TORCH_HUB_PASSWORD",
        "CUDA_LICENSE_KEY",
        "NVTE_SECRET",
        "PYTORCH_CREDENTIALS",
    ),
)
def test_a_secret_is_never_recorded(name):
    assert recorded({name: "hunter2", "NCCL_DEBUG": "INFO"}) == {"NCCL_DEBUG": "INFO"}


@given(st.dictionaries(st.sampled_from([v.name for v in VARIABLES]), st.sampled_from(("0", "1", "Ring", "8"))))
def test_a_setting_is_accepted_or_refused_never_changed(environment):
    for device in DEFAULTS:
        try:
            found = settings(device, environment)
        except ConfigError:
            continue
        assert found.keys() == DEFAULTS[device].keys()
        assert all(environment.get(name, value) == value for name, value in found.items())
