"""What the estimate of memory says of a moment's temporary memory, against what torch allocates on a CPU."""

import weakref

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.unit.sizing.test_memory import WITHIN, estimate
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.kernels import delta_rule
from tp_invariant_recipes.kernels.delta_rule import Heads
from tp_invariant_recipes.kernels.launch import Kernel
from tp_invariant_recipes.numerics.layers import delta_net
from tp_invariant_recipes.numerics.megatron.muon import gathered
from tp_invariant_recipes.numerics.sums import bucket_reduction
from tp_invariant_recipes.sizing import activations, memory, size


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


@pytest.mark.parametrize("device", ("gpu", "cpu"))
@pytest.mark.parametrize("key, value", ((64, 64), (128, 128), (128, 64)))
def test_a_gated_delta_nets_backward_pass(key, value, device, monkeypatch):
    """Two shards of it: as kernels on a GPU allocate, and one after the other in plain torch."""
    tokens, groups, heads = 512, 2, 4
    words = (
        f"seq={tokens} model.linear_num_key_heads={groups} model.linear_num_value_heads={heads} "
        f"model.linear_key_head_dim={key} model.linear_value_head_dim={value} numerics.virtual_shards=2"
    )
    config = compose("qwen3_next_toy", words.split(), device=device).config
    monkeypatch.setattr(Kernel, "launch", lambda *_: None)  # what it computes takes no more memory
    x, dy = (torch.randn(2, tokens, 1, n // 2).bfloat16() for n in (2 * groups * key + heads * value, heads * value))
    alpha, beta = (torch.randn(2, tokens, 1, heads // 2).bfloat16() for _ in range(2))
    sizes, numbers = Heads(groups // 2, heads // 2, key, value), (alpha, beta, *torch.zeros(2, 2, heads // 2))
    if device == "cpu":
        leaves = [one.requires_grad_() for one in (x, *numbers)]
        y = delta_net.gated_delta_rule(*leaves, sizes)
        step = lambda: torch.autograd.grad(y, leaves, dy)  # noqa: E731
    else:
        step = lambda: delta_net.gradients_with_kernels(sizes, dy, x, *numbers)  # noqa: E731
    with Peak() as peak:
        step()
    found = activations.backward(activations.micro_batch(config), size.DELTA_NET)
    assert found == pytest.approx(peak.most, rel=WITHIN)
    monkeypatch.setattr(activations, "_of_rule", lambda batch: 0)  # the control
    assert activations.backward(activations.micro_batch(config), size.DELTA_NET) < peak.most * (1 - WITHIN)


def test_sizes_are_those_of_the_code_that_the_estimate_may_not_import():
    assert memory.PIECE == bucket_reduction.PIECE
    assert activations.DELTA_CHUNK == delta_rule.CHUNK


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
        found, without = (estimate("qwen3_8b", one).parts[memory.LOSS] for one in (f"{plain} {muon}", plain))
        assert (found > without) is counts
