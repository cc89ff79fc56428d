"""The numerics' tests under each set of instructions that this processor has: no outcome depends on which it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROCESSOR = Path("/proc/cpuinfo")

# The instructions that a setting needs -> what has oneDNN, MKL, torch and numba use no others.
SETTINGS = {
    "SSE": ({"sse4_2"}, "SSE41", "SSE4_2", "default", "nehalem"),
    "AVX2": ({"avx2", "fma"}, "AVX2", "AVX2", "avx2", "haswell"),
    "AVX512": ({"avx512f", "avx512bw", "avx512vl", "avx512dq"}, "AVX512_CORE", "AVX512", "avx512", "skylake-avx512"),
    "AMX": ({"amx_bf16", "amx_tile"}, "ALL", "AVX512", "avx512", "sapphirerapids"),
}
VARIABLES = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY", "NUMBA_CPU_NAME")

TESTS = (
    "tests/distributed/numerics",
    *(
        f"tests/unit/{folder}/test_{name}.py"
        for folder, names in {
            "cpu_host": ("mamba_twins",),
            "kernels": ("delta_rule", "row_add", "row_sum", "weighted_activation"),
            "kernels/products": ("fp8_products", "mxfp8", "quantize"),
            "numerics/products": ("contraction", "cpu_product", "product_order"),
            "numerics/sums": ("data_shards", "partial_gradient_uses"),
            "observe": ("shards",),
            "portable": ("ieee_attention", "ieee_experts", "ieee_kernels", "ieee_math"),
            "project": ("accuracy",),
        }.items()
        for name in names
    ),
)


def _instructions() -> set[str]:
    """The flags of this machine's processor."""
    lines = (line.partition(":") for line in PROCESSOR.read_text().splitlines())
    return {flag for name, _, value in lines if name.strip() == "flags" for flag in value.split()}


@pytest.mark.release
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_numerics_tests_pass_with_these_instructions(name, tmp_path):
    needed, *values = SETTINGS[name]
    if missing := needed - _instructions():
        pytest.skip(f"{name} was not tested: this processor has no {', '.join(sorted(missing))}")
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not release", "-p", "no:cacheprovider"]
    own |= dict(zip(VARIABLES, values, strict=True)) | {"NUMBA_CACHE_DIR": str(tmp_path / "numba")}
    ended = subprocess.run([*command, *TESTS], cwd=ROOT, env=own, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-8000:]


def test_every_setting_names_files_that_exist():
    assert [test for test in TESTS if not (ROOT / test).exists()] == []


@pytest.mark.release
def test_torch_obeys_the_setting():
    """The control: else every setting would test the same instructions."""
    show = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    own = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    ended = subprocess.run([sys.executable, "-c", show], env=own, capture_output=True, text=True)
    assert ended.stdout.strip() in ("DEFAULT", "NO AVX")
