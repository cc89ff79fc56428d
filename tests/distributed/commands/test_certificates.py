# SPDX-License-Identifier: Apache-2.0
"""The certificates of tests/certificates, checked on a CPU: `tpi verify … --against` says identical.

scripts/make-certificates makes them, on any machine. They have losses, norms and all digests of 20 steps.
"""

import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.distributed.faults import fewer_kept_bits, unchecked
from tp_invariant_recipes.ledger import certificate

pytestmark = pytest.mark.usefixtures("portable_loops")

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "tests" / "certificates").glob("*.tpicert"))
# Two steps of a real model, of seq=128. 7 minutes on two busy cores, most of it in one process.
LARGE = sorted((ROOT / "tests" / "certificates" / "large").glob("*.tpicert"))
STEPS = 20
LARGEST = 512 * 1024  # bytes, so that the repository stays small
KINDS = ("clipped", "gradients", "masters", "moments")


MAKE = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "make-certificates")))


def case(file):
    """The case that a certificate is of."""
    (name,) = [name for name in MAKE.CASES if file.name.startswith(f"{name}-")]
    return name


def all_documents() -> None:
    """Megatron's mock data as they are outside of tests: tests/conftest.py makes them fewer."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = 100_000


def verify(shared, file, *overrides, before=all_documents, name):
    shutil.copy(file, shared.folder)
    arguments = (*MAKE.overrides(case(file)), "device=cpu", *overrides, "--against", file.name, "--dir", name)
    return shared("verify", *arguments, before=before)


def test_every_case_has_a_small_certificate_with_all_digests_of_enough_steps():
    assert {case(file) for file in FILES} == set(MAKE.CASES)
    for file in FILES:
        result = certificate.check(file)
        assert result.summary["steps"] == result.summary["of"] >= STEPS, file
        assert result.summary["digests"] == dict.fromkeys(KINDS, STEPS), file
        assert result.summary["numerics"]["mode"] == "portable", file
        assert file.stat().st_size < LARGEST, file


@pytest.mark.release
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_this_cpu_computes_the_certificates_bits(shared, file):
    done = verify(shared, file, "tp=1,2", name=file.stem)
    assert done.status == 0, done.stdout + done.stderr
    assert f"identical: tp=1, 2 are bitwise identical to {file.name} over {STEPS} steps" in done.stdout


def of_a_gpu():
    """The certificate whose first steps are computed in `make test`."""
    (file,) = (file for file in FILES if "-nvidia-" in file.stem and case(file) == "qwen3_toy")
    return file


def test_the_first_steps_of_a_gpus_certificate(shared):
    """Two steps of what a GPU computed; all steps of all certificates before a release."""
    file = of_a_gpu()
    done = verify(shared, file, "tp=1", "train.exit_interval=2", name="first")
    assert done.status == 0, done.stdout + done.stderr
    assert f"identical: tp=1 is bitwise identical to {file.name} over 2 of {STEPS} steps" in done.stdout


@pytest.mark.release
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", LARGE, ids=lambda file: file.stem)
def test_this_cpu_computes_two_steps_of_a_real_model(shared, file):
    shutil.copy(file, shared.folder)
    precision = "precision=fp8_tensorwise" if "fp8" in file.stem else "precision=bf16"
    words = ("qwen3_0p6b", "seq=128", "gbs=1", "iters=2", precision, "device=cpu", "tp=1", "--dir", file.stem)
    done = shared("verify", *words, *MAKE.ALWAYS, "--against", file.name, before=all_documents, status=0)
    assert f"identical: tp=1 is bitwise identical to {file.name} over 2 steps" in done.stdout


def test_one_kept_bit_less_differs(shared):
    def plant():
        all_documents()
        unchecked(fewer_kept_bits)()

    file = of_a_gpu()
    done = verify(shared, file, "tp=1", "train.exit_interval=1", before=plant, name="less")
    assert done.status == 1, done.stdout + done.stderr
    assert f"different: tp=1 is not bitwise identical to {file.name} at step 1" in done.stdout
