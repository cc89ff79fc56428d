"""Core attention with sinks, windows and both, by shards of heads on this GPU: one result for every tp.

Run with -s for the backends that Transformer Engine selects, and whether one launch has the bits of the definition.
"""

from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from tests.gpu.operands import normal_on_gpu
from tp_invariant_recipes.numerics.layers import attention as attentions
from tp_invariant_recipes.numerics.layers.attention import TENSORS, same
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]

SHARDS = 8
DEGREES = (1, 2, 4, 8)
HEADS, GROUPS, WIDTH = 64, 8, 64  # of GPT-OSS
SWITCHES = {"fused": "NVTE_FUSED_ATTN", "unfused": "NVTE_UNFUSED_ATTN"}
KINDS = {
    "sinks": {"softmax_type": "learnable"},
    "window": {"window_size": (127, 0)},
    "both": {"softmax_type": "learnable", "window_size": (127, 0)},
}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(attentions, "_batched_is_exact", {})
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")


def _core(monkeypatch, backend, degree, kind):
    """Megatron's module of one rank of tp=degree, invariant."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend, AttnMaskType

    from tp_invariant_recipes.numerics.megatron.te.wrappers import InvariantTEDotProductAttention

    for name, variable in SWITCHES.items():
        monkeypatch.setenv(variable, str(int(name == backend)))
    config = TransformerConfig(
        num_layers=1, hidden_size=1024, num_attention_heads=HEADS // degree, num_query_groups=GROUPS // degree,
        kv_channels=WIDTH, attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16,
        attention_backend=AttnBackend[backend], deterministic_mode=True, **KINDS[kind],
    )  # fmt: skip
    groups = SimpleNamespace(tp=None, cp=None)
    module = InvariantTEDotProductAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups).cuda()
    module.mesh = VirtualMesh(SHARDS // degree, 1, 0)  # attention has no sum across ranks
    return module


@pytest.mark.parametrize("length", (512, 2048))
@pytest.mark.parametrize(
    "backend, kind",
    # Transformer Engine 2.20 has no deterministic fused attention with sinks (check/invariant/invariance.py).
    (("fused", "window"), *(("unfused", kind) for kind in KINDS)),
)
def test_one_result_for_every_tp(monkeypatch, backend, kind, length):
    """Output and gradients of all heads and sinks, with the ranks' slices put together."""
    from megatron.core.transformer.enums import AttnMaskType

    made = [normal_on_gpu(length, 1, n, WIDTH, dtype=torch.bfloat16) for n in (HEADS, GROUPS, GROUPS, HEADS)]
    sinks = torch.randn(HEADS, device="cuda")
    results = {}
    for degree in DEGREES:
        ranks = []
        for rank in range(degree):
            module = _core(monkeypatch, backend, degree, kind)
            query, key, value, gradient = (tensor.chunk(degree, 2)[rank] for tensor in made)
            leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
            for weight in module._sinks():
                weight.data.copy_(sinks.chunk(degree)[rank].view_as(weight))
                leaves.append(weight)
            out = module(*leaves[:3], None, AttnMaskType.causal)
            ranks.append((out.detach(), *torch.autograd.grad(out, leaves, gradient.reshape(out.shape))))
        dims = (-1, 2, 2, 2, 0)
        results[degree] = [torch.cat(parts, dim) for parts, dim in zip(zip(*ranks, strict=True), dims, strict=False)]
    decided = [(case[0], exact) for case, exact in attentions._batched_is_exact.items()]
    print(f"\n{kind}, {length} tokens, {module.backend()}: {decided} (shards, one launch)")
    for first, other in pairwise(DEGREES):
        differ = [
            name for name, a, b in zip(TENSORS, results[first], results[other], strict=False) if not same((a,), (b,))
        ]
        assert not differ, (first, other)


def test_sinks_count(monkeypatch):
    """The control: a launch reads the sinks that it is given."""
    from megatron.core.transformer.enums import AttnMaskType

    module = _core(monkeypatch, "unfused", 1, "sinks")
    made = [normal_on_gpu(256, 1, n, WIDTH, dtype=torch.bfloat16) for n in (HEADS, GROUPS, GROUPS)]
    (weight,) = module._sinks()
    results = []
    for score in (0.0, 4.0):
        weight.data.fill_(score)
        results.append(module(*made, None, AttnMaskType.causal).detach())
    assert not same((results[0],), (results[1],))
