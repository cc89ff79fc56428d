"""What the estimate of memory says of a moment's temporary memory, against what torch allocates on a CPU."""

import weakref

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.unit.sizing.test_memory import estimate
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.numerics.megatron.muon import gathered
from tp_invariant_recipes.numerics.sums import bucket_reduction
from tp_invariant_recipes.sizing import memory, size


class Peak(TorchDispatchMode):
    """The most bytes that lived at once of what operations have allocated. living: storage -> numbers, bytes."""

    def __init__(self):
        super().__init__()
        self.living, self.now, self.most = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        old = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}  # views of these are nothing new
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in old and storage._cdata not in self.living:
                self.living[storage._cdata] = tensor.numel(), storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata)
        self.most = max(self.most, self.now)
        return out

    def _freed(self, storage):
        self.now -= self.living.pop(storage)[1]


def _tensors(values):
    return [tensor for tensor in tree_leaves(values) if isinstance(tensor, torch.Tensor)]


def test_sizes_are_those_of_the_code_that_the_estimate_may_not_import():
    assert memory.PIECE == bucket_reduction.PIECE


def test_muons_step():
    """Of the first product of the MLP, the largest matrix, as one rank has it."""
    words = "qwen3_toy optimizer.optimizer=muon optimizer.muon_tp_mode=duplicated"
    config = compose("qwen3_toy", words.split()[1:], device="cpu").config
    model = config.model
    momentum = torch.randn(2 * model["ffn_hidden_size"], model["hidden_size"])
    with Peak() as peak:
        whole = gathered(momentum, None, None)
        newton_schulz(whole, steps=5)
    expected = memory._of_step(config, config.layout, size.Weights(), size.matrices(config.shape, size.MLP).largest)
    assert expected == pytest.approx(peak.most, rel=0.02)
    # It counts where it is more than all that a forward pass keeps.
    muon = words.partition(" ")[2]
    for tokens, counts in ((8192, False), (128, True)):
        plain = f"seq={tokens} model.vocab_size=4096"
        result, without = (estimate("qwen3_8b", item).parts[memory.LOSS] for item in (f"{plain} {muon}", plain))
        assert (result > without) is counts
