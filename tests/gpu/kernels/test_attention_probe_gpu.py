# SPDX-License-Identifier: Apache-2.0
"""Core attention by shards of heads on this GPU: one result for every tp, and what a launch for all shards computes.

With sinks, windows and both too.

Run with -s for a table of the backends: for every shape and tp, the tensors whose bits one launch of all heads of a
rank changes against one launch for each shard.
"""

from importlib.util import find_spec
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch

from tests.gpu.kernels.operands import normal_on_gpu
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.numerics.gemm.probe import cancelling_attention
from tp_invariant_recipes.numerics.layers import attention as attentions
from tp_invariant_recipes.numerics.layers.attention import GRADIENTS, TENSORS, Operands, outcome, same
from tp_invariant_recipes.numerics.megatron import replacements
from tp_invariant_recipes.numerics.megatron.attention.core_attention import backend_in_force
from tp_invariant_recipes.numerics.settings import NumericsSettings
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.replacement import applied

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]

SHARDS = 8
NUMERICS = NumericsSettings(virtual_shards=SHARDS)
DEGREES = (1, 2, 4, 8)
# Heads, query groups, width of a head.
SIZES = {"qwen3_toy": (8, 8, 16), "qwen3_0p6b": (16, 8, 128), "qwen3_8b": (32, 8, 128), "gpt_oss": (64, 8, 64)}
MODELS = [model for model in SIZES if model != "gpt_oss"]  # whose attention has no other kind
KINDS = {
    "sinks": {"softmax_type": "learnable"},
    "window": {"window_size": (127, 0)},
    "both": {"softmax_type": "learnable", "window_size": (127, 0)},
}
SWITCHES = {"flash": "NVTE_FLASH_ATTN", "fused": "NVTE_FUSED_ATTN", "unfused": "NVTE_UNFUSED_ATTN"}
BACKENDS = (
    "fused",
    "unfused",
    pytest.param("flash", marks=pytest.mark.skipif(find_spec("flash_attn") is None, reason="no flash-attn")),
)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(attentions, "_batched_is_exact", {})
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


@pytest.fixture
def core(monkeypatch):
    """(backend, model, degree, fields of a kind) → Megatron's module of one rank of tp=degree, invariant."""

    def make(backend: str, model: str, degree: int, **kind):
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.enums import AttnBackend, AttnMaskType

        from tp_invariant_recipes.numerics.megatron.te_wrappers import InvariantTEDotProductAttention

        for name, variable in SWITCHES.items():
            monkeypatch.setenv(variable, str(int(name == backend)))
        _select_anew()
        heads, groups, width = SIZES[model]
        config = TransformerConfig(
            num_layers=1, hidden_size=1024, num_attention_heads=heads // degree, num_query_groups=groups // degree,
            kv_channels=width, attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16,
            attention_backend=AttnBackend[backend], deterministic_mode=True, **kind,
        )  # fmt: skip
        alone = SimpleNamespace(tp=None, cp=None)
        module = InvariantTEDotProductAttention(config, 1, AttnMaskType.causal, "self", pg_collection=alone).cuda()
        # A rank of tp=degree, with nobody to talk to: attention has no sum across ranks.
        module.mesh = VirtualMesh(SHARDS // degree, 1, 0)
        return module

    return make


def _select_anew():
    """Transformer Engine keeps its latest selection until it is asked for other shapes."""
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    dot_product_attention._attention_backends["backend_selection_requires_update"] = True


def mask():
    from megatron.core.transformer.enums import AttnMaskType

    return None, AttnMaskType.causal


def operands(model, length, values):
    """Query, key, value and the output's gradient, of all heads."""
    heads, groups, width = SIZES[model]
    made = [normal_on_gpu(length, 1, n, width, dtype=torch.bfloat16) for n in (heads, groups, groups, heads)]
    if values == "cancelling":
        cancelling_attention(*made, torch.Generator("cuda").manual_seed(1), late=True)
    if values == "wide":
        for tensor in made:
            tensor.mul_(torch.randint(-6, 4, tensor.shape[2:], device="cuda").float().exp2())
    return made


def of_rank(made, degree, rank):
    """Slices of the heads, as they lie."""
    return [tensor.chunk(degree, 2)[rank] for tensor in made]


# Transformer Engine 2.20 has no deterministic fused attention with sinks (check/invariant/invariance.py).
ATTENTIONS = (
    *product(("fused", "unfused"), MODELS, ("",), (128, 2048, 8192), ("normal", "wide", "cancelling")),
    *product(("fused",), ("gpt_oss",), ("window",), (512, 2048), ("normal",)),
    *product(("unfused",), ("gpt_oss",), tuple(KINDS), (512, 2048), ("normal",)),
)


@pytest.mark.parametrize("backend, model, kind, length, values", ATTENTIONS)
def test_one_result_for_every_tp(core, backend, model, kind, length, values):
    """Output and gradients of all heads and sinks, with the ranks' slices put together; prints what ranks decided."""
    made, sinks, results = operands(model, length, values), torch.randn(64, device="cuda"), {}
    for degree in DEGREES:
        module, ranks = core(backend, model, degree, **KINDS.get(kind, {})), []
        for rank in range(degree):
            for weight in module._sinks():
                weight.data.copy_(sinks.chunk(degree)[rank].view_as(weight))
            ranks.append(_live(module, of_rank(made, degree, rank)))
        dims = (-1, 2, 2, 2, *(0 for _ in module._sinks()))
        results[degree] = [torch.cat(parts, dim) for parts, dim in zip(zip(*ranks, strict=True), dims, strict=True)]
        assert module.backend().split()[0] == backend
    decided = [(case[0], exact) for case, exact in attentions._batched_is_exact.items()]
    print(f"\n{backend}, {len(made[0])} tokens: {decided} (shards, one launch)")
    names = ("output", *GRADIENTS)[: len(dims)]
    for first, other in pairwise(DEGREES):
        differ = [
            name for name, a, b in zip(names, results[first], results[other], strict=True) if not same((a,), (b,))
        ]
        assert not differ, (first, other)


def _live(module, slices):
    query, key, value, gradient = slices
    inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    out = module(*inputs, *mask())
    return out.detach(), *torch.autograd.grad(out, [*inputs, *module._sinks()], gradient.reshape(out.shape))


def test_sinks_count(core):
    """The control: a launch reads the sinks that it is given."""
    module, made = core("unfused", "gpt_oss", 1, **KINDS["sinks"]), operands("gpt_oss", 256, "normal")
    (weight,) = module._sinks()
    results = []
    for score in (0.0, 4.0):
        weight.data.fill_(score)
        results.append(_live(module, made)[:1])
    assert not same(*results)


@pytest.mark.parametrize("values", ("normal", "wide", "cancelling"))
@pytest.mark.parametrize("length", (128, 2048, 8192))
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_probe_decides_as_live_operands_do(core, backend, model, length, values):
    """One line of the table: where the probe says yes, one launch has the bits of the definition on these operands."""
    made, line = operands(model, length, values), []
    for degree in DEGREES:
        module = core(backend, model, degree)
        shards, (*inputs, gradient) = SHARDS // degree, [t.contiguous() for t in of_rank(made, degree, degree - 1)]
        first, second = (
            outcome(form, module, Operands(*inputs, gradient), mask(), shards)
            for form in (attentions._batched, attentions._defined)
        )
        differ = [name for name, a, b in zip(TENSORS, first, second, strict=True) if not same((a,), (b,))]
        try:
            batched = attentions.check_passes(module, *inputs, mask(), shards)
            forward = attentions.check_passes(module, *inputs, mask(), shards, graded=False)
        except RunError as refused:
            batched, forward, line = None, None, [*line, str(refused)[:60]]
        assert not (batched and differ), (degree, differ)
        assert not (forward and "output" in differ), degree  # of a layer that is computed again
        line.append(
            f"tp={degree} ({shards} × {inputs[0].shape[2] // shards}): {', '.join(differ) or 'same'}; {batched}"
        )
    print(f"\n| {module.backend()} | {model} | {length} | {values} | {' | '.join(line)} |")


@pytest.mark.parametrize("checked", (False, True))
def test_live_operands_are_checked(core, monkeypatch, checked):
    """With TPI_CHECK_PRODUCTS=1 both forms run, and give what one gives."""
    monkeypatch.setattr(attentions, "checking", lambda: checked)
    made = operands("qwen3_0p6b", 2048, "normal")
    module = core("fused", "qwen3_0p6b", 2)
    slices = of_rank(made, 2, 1)
    result = _live(module, slices)
    dense = [tensor.contiguous() for tensor in slices]
    assert same(result, outcome(attentions._defined, module, Operands(*dense), mask(), 4))


class Reversed(attentions.Core):
    """A backend that walks through keys, or queries, in another order when it is given several shards."""

    def __init__(self, module, heads, walk):
        self.module, self.heads, self.walk = module, heads, walk

    def backend(self):
        return self.module.backend()

    def kind(self, mask):
        return ()

    def launch(self, query, key, value, mask):
        if query.shape[2] == self.heads:
            return self.module.launch(query, key, value, mask)
        if self.walk == "keys":
            return self.module.launch(query, key.flip(0), value.flip(0), mask)
        return self.module.launch(query.flip(0), key, value, mask).flip(0)


@pytest.mark.parametrize("walk, seen", (("keys", {"output", "dQ"}), ("queries", {"dK", "dV"})))
@pytest.mark.parametrize("backend", ("fused", "unfused"))
def test_a_launch_with_another_order_of_sums_is_refused(core, backend, walk, seen):
    """The control: the backend itself. Without a mask another order of positions is another order of sums alone."""
    from megatron.core.transformer.enums import AttnMaskType

    module, no_mask = core(backend, "qwen3_8b", 2), (None, AttnMaskType.no_mask)
    *inputs, gradient = [tensor.contiguous() for tensor in of_rank(operands("qwen3_8b", 2048, "cancelling"), 2, 0)]
    lying = Reversed(module, 4, walk)
    first, second = (
        outcome(form, lying, Operands(*inputs, gradient), no_mask, 4)
        for form in (attentions._batched, attentions._defined)
    )
    differ = {name for name, a, b in zip(TENSORS, first, second, strict=True) if not same((a,), (b,))}
    print(f"\n{backend}, {walk} in another order: {differ} differ")
    assert differ >= seen
    assert not attentions.check_passes(lying, *inputs, no_mask, 4)


def test_flash_attn_is_not_selected(core, monkeypatch):
    """The invariant modes' replacement of Transformer Engine's selection, asked for flash-attn alone and for any."""
    module = core("unfused", "qwen3_0p6b", 2)
    made = of_rank(operands("qwen3_0p6b", 2048, "normal"), 2, 0)
    for name, variable in SWITCHES.items():
        monkeypatch.setenv(variable, str(int(name == "flash")))
    rows = [row for row in replacements.replacements(NUMERICS) if row.target.endswith(":get_attention_backend")]
    assert len(rows) == 1
    with applied(rows):
        _select_anew()
        with pytest.raises(ValueError, match="No dot product attention backend is available"):
            _live(module, made)
        for variable in SWITCHES.values():
            monkeypatch.setenv(variable, "1")
        _select_anew()
        _live(module, made)
    assert module.backend().split()[0] in ("fused", "unfused")


@pytest.mark.parametrize("backend", ("fused", "unfused"))
def test_the_ledger_names_what_runs(core, backend):
    module = core(backend, "qwen3_8b", 4)
    named = backend_in_force([torch.nn.ModuleList([module])], 2048, 1)
    _live(module, of_rank(operands("qwen3_8b", 2048, "normal"), 4, 0))
    assert named == module.backend()
    assert named.split()[0] == backend
