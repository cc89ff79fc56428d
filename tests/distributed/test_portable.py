"""`numerics=portable` on a CPU: one ledger for every layout; other arithmetic shows, and is refused."""

import pytest

SMALL = ("qwen3_toy", "numerics=portable", "seq=64", "gbs=2", "iters=2")
LAYOUTS = ("tp=2", "tp=4 sp=false", pytest.param("tp=1 pp=2", marks=pytest.mark.release))


def _train(shared, name, *overrides, before=None):
    done = shared("train", *SMALL, *overrides, f"run.dir={name}", before=before)
    assert done.status == 0, done.stderr
    return shared.ledger(name)


@pytest.fixture(scope="module")
def reference(shared):
    return _train(shared, "reference")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_ledger_for_all_layouts(shared, reference, layout):
    assert _train(shared, layout.replace(" ", "-"), *layout.split()) == reference


def test_tree_has_another_one(shared, reference):
    done = shared("train", *SMALL, "numerics=tree", "run.dir=tree")
    assert done.status == 0, done.stderr
    assert shared.ledger("tree")[0].gradients != reference[0].gradients


def _without_conformance() -> None:
    from tp_invariant_recipes.numerics import portable

    portable.require_conformance = lambda: None


def _one_kept_bit_less() -> None:
    from tp_invariant_recipes.kernels import tensor_core_cpu

    tensor_core_cpu.KEPT -= 1


def _steps_of_eight() -> None:
    """Zeros change no step: with eight between every eight numbers, a step of 16 adds eight products."""
    import torch

    from tp_invariant_recipes.kernels import tensor_core_cpu

    original = tensor_core_cpu.product

    def spread(x, dim):
        x = x.movedim(dim, -1)
        x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)).unflatten(-1, (-1, 8))
        return torch.nn.functional.pad(x, (0, 8)).flatten(-2).movedim(-1, dim)

    tensor_core_cpu.product = lambda a, b: original(spread(a, 1), spread(b, 0))


@pytest.mark.parametrize("arithmetic", (_one_kept_bit_less, _steps_of_eight), ids=lambda plant: plant.__name__)
def test_other_products_have_another_ledger(shared, reference, arithmetic):
    def plant() -> None:
        _without_conformance()
        arithmetic()

    assert _train(shared, arithmetic.__name__, before=plant)[0].gradients != reference[0].gradients


@pytest.mark.parametrize("arithmetic", (_one_kept_bit_less, _steps_of_eight), ids=lambda plant: plant.__name__)
def test_a_machine_with_other_products_is_refused(shared, arithmetic):
    refused = shared("train", *SMALL, f"run.dir=refused{arithmetic.__name__}", before=arithmetic)
    assert refused.status == 2
    assert refused.stderr.count("numerics=portable: this CPU computes other bits than the definition") == 1
    assert "bf16/" in refused.stderr
