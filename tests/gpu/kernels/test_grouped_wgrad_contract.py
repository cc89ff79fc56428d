# SPDX-License-Identifier: Apache-2.0
"""What the installed layers return to autograd for their weights: what the table says, before and after the patches.

Linear and GroupedLinear run as they are. The fused grouped MLP needs a Blackwell GPU; the function in which it decides
what to return does not, and is called with a product that does nothing.
"""

import inspect
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

from tests.wgrad_contract import CONTRACT, LAYERS, contract, upstream
from tp_invariant_recipes.machine.versions import installed
from tp_invariant_recipes.patches import patch as code
from tp_invariant_recipes.patches import registry
from tp_invariant_recipes.patches.te_grouped import within_main_grad
from tp_invariant_recipes.replacement import applied

pytestmark = pytest.mark.gpu

VERSION = installed("transformer-engine") or "0"
GROUPS, ROWS, COLUMNS = 4, 64, 128  # GEMMs, output features, input features
SPLITS = [32, 64, 32, 128]
FUSED = ("grouped_mlp", "backward_grouped_mlp")  # modules, by release
MODES = tuple(CONTRACT)


def here(layer):
    return Version(VERSION) >= Version(LAYERS[layer])


def patches(patched):
    """Those that this version needs, whatever the run."""
    chosen = [patch for patch, verdict in registry.verdicts() if verdict.state == "applies" and "wgrad" in patch.name]
    return applied(r for patch in chosen for r in patch.replacements if patched)


def module_of(name, mode):
    """A module of Transformer Engine, and its forward."""
    import transformer_engine.pytorch as te

    groups = () if name == "Linear module" else (GROUPS,)
    kind = te.Linear if name == "Linear module" else te.GroupedLinear
    layer = kind(
        *groups, COLUMNS, ROWS, bias=False, params_dtype=torch.bfloat16,
        fuse_wgrad_accumulation=mode.accumulates, delay_wgrad_compute=mode.delayed,
    )  # fmt: skip
    return layer, lambda x: layer(x, SPLITS) if groups else layer(x)


def grouped_op(name, mode):
    from transformer_engine.pytorch import ops

    more = {"delay_wgrad_compute": mode.delayed} if here("GroupedLinear op, single") else {}
    more |= {"single_grouped_weight": True} if name.endswith("single") else {}
    layer = ops.GroupedLinear(
        GROUPS, COLUMNS, ROWS, bias=False, device="cuda", dtype=torch.bfloat16,
        accumulate_into_main_grad=mode.accumulates, **more,
    )  # fmt: skip
    return layer, lambda x: layer(x, torch.tensor(SPLITS, device="cuda"))


LAYER = {
    "Linear module": module_of, "GroupedLinear module": module_of, "GroupedLinear op": grouped_op,
    "GroupedLinear op, single": grouped_op,
}  # fmt: skip


@pytest.fixture
def build(monkeypatch):
    """(layer's name, mode) -> layer, its forward, its weights with main_grad of ones."""
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")

    def make(name, mode):
        if not here(name):
            pytest.skip(f"Transformer Engine {VERSION} has no {name}")
        if mode.delayed and "op" in name and not here("GroupedLinear op, single"):
            pytest.skip(f"Transformer Engine {VERSION} has no delayed weight gradients in operations")
        single = name.endswith("single")
        if single and not single_weights_run():
            pytest.skip("a single grouped weight needs a newer cuBLASLt on this GPU")
        torch.manual_seed(0)
        layer, forward = LAYER[name](name, mode)
        weights = list(layer.parameters())
        assert len(weights) == (1 if single or name == "Linear module" else GROUPS)
        prepare(weights, mode)
        return layer, forward, weights

    return make


def single_weights_run():
    from transformer_engine.pytorch.ops.basic import grouped_linear

    supported = getattr(grouped_linear, "is_op_fuser_grouped_tensor_path_supported", None)
    return supported is None or supported(None, torch.bfloat16)


def prepare(weights, mode):
    # In the weights' own type: autograd would copy another, and a view of main_grad be seen as something else.
    for weight in weights:
        weight.main_grad = torch.ones(tuple(weight.size()), dtype=weight.dtype, device="cuda")
        if mode.flagged:
            weight.grad_added_to_main_grad = False


def kind(returned, weight, mode):
    from transformer_engine.pytorch.module.base import get_dummy_wgrad

    if returned is None:
        return "none"
    if mode.flagged and returned.data_ptr() == get_dummy_wgrad(list(weight.size()), weight.dtype).data_ptr():
        return "dummy"
    if within_main_grad(returned, weight):
        return "main_grad"
    return "unwritten" if mode.delayed else "wgrad"


def whole_numbers(*shape):
    """Small ones, whose products add up exactly in bf16."""
    return torch.randint(-1, 2, shape, device="cuda").to(torch.bfloat16)


def exact_gradients(x, dy, weights):
    parts = zip(x.split(SPLITS), dy.split(SPLITS), strict=True)
    each = [(d.float().T @ a.float()).bfloat16() for a, d in parts]
    if len(weights) == GROUPS:
        return each
    return [torch.stack(each)] if weights[0].dim() == 3 else [sum(each)]


@pytest.mark.parametrize("patched", (True, False))
@pytest.mark.parametrize("name", LAYER)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_each_cell(build, mode, name, patched):
    layer, forward, weights = build(name, mode)
    returned = {}
    for place, weight in enumerate(weights):
        weight.register_hook(lambda gradient, place=place: returned.__setitem__(place, gradient))
    x, dy = whole_numbers(sum(SPLITS), COLUMNS).requires_grad_(), whole_numbers(sum(SPLITS), ROWS)
    with patches(patched):
        forward(x).backward(dy)
    wanted = contract(mode, name) if patched else upstream(mode, name, VERSION)
    assert [kind(returned.get(place), weight, mode) for place, weight in enumerate(weights)] == [wanted] * len(weights)
    if mode.delayed:
        layer.backward_dw()
    for weight, exact in zip(weights, exact_gradients(x.detach(), dy, weights), strict=True):
        if mode.accumulates:
            assert torch.equal(weight.main_grad.view_as(exact), 1 + exact)
        else:
            assert torch.equal(torch.as_tensor(weight.grad).view_as(exact), exact)
            assert weight.main_grad.eq(1).all()
        if mode.flagged and patched:
            assert weight.grad_added_to_main_grad is True


@pytest.mark.parametrize("patched", (True, False))
@pytest.mark.parametrize("name", ("fused grouped MLP", "fused grouped MLP, single"))
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_each_cell_of_the_fused_grouped_mlp(monkeypatch, mode, name, patched):
    if not here(name):
        pytest.skip(f"Transformer Engine {VERSION} has no {name}")
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    module = fused_module()
    monkeypatch.setattr(module, "general_grouped_gemm_for_grouped_tensor", lambda *operands, **how: None)
    op, _ = grouped_op(name, mode)
    weights = list(op.parameters())
    prepare(weights, mode)
    ctx = SimpleNamespace(weight_requires_grad=True)
    plain = (GROUPS, (ROWS, COLUMNS), None, None, torch.bfloat16, torch.device("cuda"), None, None)
    taken = inspect.signature(module._compute_grad_params).parameters
    more = {parameter: None for parameter, how in taken.items() if how.kind is how.KEYWORD_ONLY}
    with patches(patched):
        returned = module._compute_grad_params(op, ctx, *plain, **more)
    wanted = contract(mode, name) if patched else upstream(mode, name, VERSION)
    assert [kind(g, weight, mode) for g, weight in zip(returned, weights, strict=True)] == [wanted] * len(weights)


def fused_module():
    folder = code.folder("transformer_engine")
    (name,) = (name for name in FUSED if (folder / f"pytorch/ops/fused/{name}.py").exists())
    return import_module(f"transformer_engine.pytorch.ops.fused.{name}")


def test_no_patch_of_these_is_refused():
    assert {patch.name: verdict.reason for patch, verdict in registry.verdicts() if verdict.state == "refused"} == {}
