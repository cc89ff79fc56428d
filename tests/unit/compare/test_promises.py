"""What tpi compare says of runs on different architectures."""

import pytest

from tp_invariant_recipes.compare.promises import promise
from tp_invariant_recipes.ledger.record import Header

CPU = {"name": "cpu", "compute_capability": "0.0", "machine": "x86_64", "attention": "portable 1"}
ARM = CPU | {"machine": "aarch64"}
H200 = {"name": "NVIDIA H200", "compute_capability": "9.0", "attention": "portable 1"}


def header(mode, device):
    return Header(identity={"rng.seed": 1}, numerics={"mode": mode}, device=device)


@pytest.mark.parametrize("other", (ARM, H200), ids=("arm", "gpu"))
def test_portable_promises_equal_bits(other):
    said = promise(header("portable", CPU), header("portable", other), True)
    assert "numerics=portable promises equal bits there" in said
    assert "defect" in said
    assert "with the equal bits" in promise(header("portable", CPU), header("portable", other), False)


@pytest.mark.parametrize("modes", (("tree", "tree"), ("portable", "tree"), ("stock", "stock")))
def test_other_modes_do_not(modes):
    said = promise(header(modes[0], CPU), header(modes[1], H200), True)
    assert "cpu x86_64; NVIDIA H200 9.0" in said
    assert "equal bits are not promised there, and this difference is no defect" in said
    assert said.endswith("numerics=portable promises them.")


def test_neither_do_two_versions_of_the_definition():
    said = promise(header("portable", CPU), header("portable", ARM | {"attention": "portable 2"}), True)
    assert said.endswith("(portable 1; portable 2): not promised.")


@pytest.mark.parametrize("mode", ("portable", "tree"))
def test_one_architecture_needs_no_word(mode):
    assert promise(header(mode, CPU), header(mode, CPU | {"attention": "local"}), True) is None
