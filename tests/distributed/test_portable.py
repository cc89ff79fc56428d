"""`numerics=portable` on a CPU: one ledger for every layout, of stated operations alone; other arithmetic shows."""

import json
from pathlib import Path

import pytest

SMALL = ("qwen3_toy", "numerics=portable", "seq=64", "gbs=2", "iters=2")
LAYOUTS = ("tp=2", "tp=4 sp=false", pytest.param("tp=1 pp=2", marks=pytest.mark.release))

# torch's operations on floating-point numbers that have one result on every machine: they move or convert bytes, or
# round an element once. Sums are of whole numbers, of zeros and one number, of two numbers, or in fp64 and exact.
MOVES = {
    "_to_copy", "_unsafe_view", "alias", "as_strided", "cat", "chunk", "clone", "copy_", "detach", "detach_", "empty",
    "empty_like", "empty_strided", "expand", "fill_", "full", "full_like", "gather", "index", "index_put_",
    "masked_fill", "masked_fill_", "narrow", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
    "ones", "ones_like", "permute", "repeat", "reshape", "resize_", "select", "select_backward", "set_", "slice",
    "slice_backward", "split", "split_with_sizes", "squeeze", "stack", "t", "to", "transpose", "unbind", "unsqueeze",
    "view", "zero_", "zeros", "zeros_like", "_reshape_alias", "_reshape_copy", "contiguous", "flatten", "view_as",
    "unflatten", "_foreach_copy_", "_foreach_zero_",
}  # fmt: skip
ROUNDS_ONCE = {"_foreach_add_", "add", "add_", "div", "div_", "mul", "mul_", "neg", "sub", "sub_"}
EXACT = {
    "_local_scalar_dense", "abs", "all", "amax", "any", "bitwise_and", "eq", "equal", "ge", "gt", "is_same_size",
    "isinf", "isnan", "item", "le", "lt", "max", "maximum", "ne", "where", "isfinite", "aminmax", "clamp", "clamp_",
    "clamp_min",
}  # fmt: skip
# Not elementwise, each with what keeps it exact.
ELSEWHERE = {
    "sum": "of loss masks, which are whole numbers, and of losses in fp64",
}


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


def _listing_operations() -> None:
    """Write the names of all operations of torch on floating-point numbers, of the whole training."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from tp_invariant_recipes.training import rank

    class Listing(TorchDispatchMode):
        names: set[str]

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
            if any(x.is_floating_point() for x in tensors):
                self.names.add(f"{func.namespace}.{func._schema.name.split('::')[1]}")
            return out

    original = rank.pretrain

    def pretrain(*args, **kwargs):
        with Listing() as listing:
            listing.names = set()
            try:
                return original(*args, **kwargs)
            finally:
                Path("operations.json").write_text(json.dumps(sorted(listing.names)))

    rank.pretrain = pretrain


def test_a_run_has_stated_operations_only(shared):
    _train(shared, "listed", "ledger.digests=0", before=_listing_operations)
    names = json.loads((shared.folder / "operations.json").read_text())
    assert "aten.add" in names
    allowed = MOVES | ROUNDS_ONCE | EXACT | set(ELSEWHERE)
    others = [name for name in names if name.partition(".")[2] not in allowed]
    assert not others, " ".join(others)
