# SPDX-License-Identifier: Apache-2.0
"""Weights move between `numerics=stock` and `numerics=tree`, under the same names, bit for bit, to any degree."""

import pytest
import torch
from torch.distributed import checkpoint as dcp

from tests.operands import same_bits

pytestmark = pytest.mark.release

TOY = ("train", "qwen3_toy", "model.num_layers=1", "seq=32", "gbs=1")
# Steps that change nothing, to save what was loaded.
STILL = ("optimizer.lr=0", "optimizer.min_lr=0")
OTHER = {"stock": "tree", "tree": "stock"}


def _ran(tpi, *arguments):
    tpi(*TOY, *arguments, status=0)


@pytest.fixture(scope="module")
def saved(shared):
    """Folder "stock" and folder "tree": two steps each at tp=1, saved."""
    for mode in OTHER:
        _ran(shared, f"numerics={mode}", "tp=1", "iters=2", "save=2", f"run.dir={mode}")
    return shared


def _tensors(folder):
    """Name -> tensor, all that a checkpoint of Megatron's format holds but the states of generators."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    results = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if hasattr(entry, "size")
    }
    dcp.load(results, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return {name: tensor for name, tensor in results.items() if not name.startswith("rng")}


def _weights(folder):
    return {name: tensor for name, tensor in _tensors(folder).items() if not name.startswith("optimizer")}


@pytest.mark.parametrize("mode", OTHER)
def test_the_other_loads_what_was_saved(saved, mode):
    """Saved at tp=1 by one, loaded at tp=2 by the other."""
    name, start = f"still-from-{mode}", saved.folder / mode / "checkpoints"
    _ran(
        saved, f"numerics={OTHER[mode]}", "tp=2", "iters=1", "save=1", *STILL, f"run.dir={name}",
        f"checkpoint.pretrained_checkpoint={start}",
    )  # fmt: skip
    other = saved.folder / OTHER[mode] / "checkpoints" / "iter_0000002"
    assert {n: (t.shape, t.dtype) for n, t in _tensors(start / "iter_0000002").items()} == {
        n: (t.shape, t.dtype) for n, t in _tensors(other).items()
    }
    before = _weights(start / "iter_0000002")
    after = _weights(saved.folder / name / "checkpoints" / "iter_0000001")
    assert before.keys() == after.keys() >= {"embedding.word_embeddings.weight"}
    assert [n for n in before if not same_bits(before[n], after[n])] == []
    fresh = _weights(other)
    assert [n for n in before if before[n].ndim > 1 and same_bits(before[n], fresh[n])] == []  # they did differ


def test_a_tree_run_from_stock_weights_is_invariant(saved):
    for tp in (1, 2):
        _ran(
            saved, "numerics=tree", f"tp={tp}", "iters=3", f"run.dir=from-stock-tp{tp}",
            "checkpoint.pretrained_checkpoint=stock/checkpoints",
        )  # fmt: skip
    first, second = (saved.ledger(f"from-stock-tp{tp}") for tp in (1, 2))
    assert first == second
    assert first[0].loss != saved.ledger("tree")[0].loss  # other weights than it draws itself
