# SPDX-License-Identifier: Apache-2.0
"""No layer gives autograd a gradient that is already in main_grad, and none that is not there yet."""

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.wgrad_contract import CONTRACT, DEVIATIONS, LAYERS, WgradMode, contract, upstream
from tp_invariant_recipes.patches import registry, te_grouped

GROUPS, SHAPE = 3, (2, 4)
MODES = tuple(CONTRACT)
RELEASES = ("2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0", "2.16.1", "2.17.1", "2.18.0", "2.19.0", "2.20.2")

# The table in NVIDIA/TransformerEngine#2871, one line a mode: the Linear module, the fused grouped MLP.
DISCUSSED = """
vanilla                       wgrad  wgrad
delayed                       none   none
accumulates                   none   none
accumulates-flagged           dummy  dummy
delayed-accumulates           none   none
delayed-accumulates-flagged   dummy  dummy
"""


@pytest.fixture(autouse=True)
def dummies(monkeypatch) -> dict[tuple, torch.Tensor]:
    """Transformer Engine's placeholders, by shape."""
    made: dict[tuple, torch.Tensor] = {}

    def get_dummy_wgrad(shape: list, dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
        tensor = made.setdefault((*shape, dtype), torch.full(shape, 99.0, dtype=dtype))
        return (tensor.zero_() if zero else tensor).detach()

    base = ModuleType("base")
    base.get_dummy_wgrad = get_dummy_wgrad
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.module"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.module.base", base)
    return made


def test_the_table_is_the_discussed_one():
    rows = {mode: returned for mode, *returned in map(str.split, DISCUSSED.strip().splitlines())}
    assert rows == {str(mode): [contract(mode, "Linear module"), contract(mode, "fused grouped MLP")] for mode in MODES}


def test_every_broken_cell_has_a_patch_for_its_versions():
    patches = {patch.name: patch for patch in registry.PATCHES}
    for deviation in DEVIATIONS:
        assert deviation.returns != contract(deviation.mode, deviation.layer)
        broken = [v for v in RELEASES if upstream(deviation.mode, deviation.layer, v) == deviation.returns]
        assert broken
        listed = [known for function in patches[deviation.patch].functions for known in function.known]
        for version in broken:
            assert any(covers(known, version) for known in listed), (deviation, version)


def covers(known: str, version: str) -> bool:
    """Whether "2.14.0, 2.14.1" or "2.11.0 to 2.14.1" speaks of a version."""
    named = re.findall(r"\d[\d.]+", known)
    number = lambda text: tuple(map(int, text.split(".")))  # noqa: E731
    return version in named or (" to " in known and number(named[0]) <= number(version) <= number(named[1]))


def test_what_no_version_breaks():
    for layer, first in LAYERS.items():
        assert upstream(WgradMode(), layer, first + ".0") == "wgrad"
    assert all(upstream(mode, "Linear module", release) == contract(mode, "Linear module")
               for mode in MODES for release in RELEASES)  # fmt: skip
    assert all(upstream(mode, layer, "2.20.2") == contract(mode, layer)
               for mode in MODES for layer in LAYERS if layer != "GroupedLinear module")  # fmt: skip


def weights(mode: WgradMode, *, single: bool = False, overwrite: bool = False) -> list[torch.nn.Parameter]:
    shapes = [(GROUPS, *SHAPE)] if single else [SHAPE] * GROUPS
    made = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for weight in made:
        weight.main_grad = torch.zeros_like(weight.data)
        if mode.flagged:
            weight.grad_added_to_main_grad = False
        if overwrite:
            weight.overwrite_main_grad = True
    return made


def operation(mode: WgradMode, made: list[torch.nn.Parameter], biases: str = "") -> SimpleNamespace:
    single = len(made) == 1
    names = {"weight": made[0]} if single else {f"weight{i}": weight for i, weight in enumerate(made)}
    return SimpleNamespace(
        **names,
        num_groups=GROUPS,
        has_bias=bool(biases),
        single_grouped_weight=single,
        single_grouped_bias=biases == "one",
        wgrad_store=SimpleNamespace(delay_wgrad_compute=lambda: mode.delayed),
        _accumulate_into_main_grad=mode.accumulates,
    )


def kind(returned: torch.Tensor | None, weight: torch.nn.Parameter, dummies: dict) -> str:
    if returned is None:
        return "none"
    places = {tensor.data_ptr(): "dummy" for tensor in dummies.values()} | {weight.main_grad.data_ptr(): "main_grad"}
    return places.get(returned.data_ptr(), "wgrad")


RETURNS = {
    "wgrad": lambda weight: torch.ones_like(weight.data),
    "none": lambda weight: None,
    "main_grad": lambda weight: weight.main_grad.view_as(weight),
    "unwritten": lambda weight: torch.ones_like(weight.data),
}


def returned_by(what: str, mode: WgradMode, made: list) -> list:
    if what != "dummy":
        return [RETURNS[what](weight) for weight in made]
    return [te_grouped.settled(weight, None, mode.delayed, mode.accumulates) for weight in made]


@pytest.mark.parametrize("wrapper", ("op", "mlp"))
@pytest.mark.parametrize("single", (False, True))
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_each_cell_after_the_patch(mode, single, wrapper, dummies):
    """For each release, whatever it returns: the contract."""
    layer = ("GroupedLinear op" if wrapper == "op" else "fused grouped MLP") + (", single" if single else "")
    for release in RELEASES:
        made = weights(mode, single=single)
        op = operation(mode, made)
        gradients = returned_by(upstream(mode, layer, release), mode, made)
        if wrapper == "op":
            function = te_grouped.settled_op(lambda self, contexts, dy: (dy, [gradients], [(None,)]))  # noqa: B023
            dx, (settled,), extra = function(op, [SimpleNamespace(weight_requires_grad=True)], "dy")
            assert (dx, extra) == ("dy", [(None,)])
        else:
            function = te_grouped.settled_mlp(lambda fc_op, ctx, *others: gradients)  # noqa: B023
            settled = function(op, SimpleNamespace(weight_requires_grad=True), GROUPS)
        wanted = contract(mode, layer)
        assert [kind(g, w, dummies) for g, w in zip(settled, made, strict=True)] == [wanted] * len(made)
        assert all(getattr(w, "grad_added_to_main_grad", False) == (wanted == "dummy") for w in made)
        if wanted == "wgrad":
            assert all(first is other for first, other in zip(settled, gradients, strict=True))


@pytest.mark.parametrize("biases", ("", "each", "one"))
@pytest.mark.parametrize("single", (False, True))
def test_biases_keep_their_place(single, biases):
    mode = WgradMode(accumulates=True)
    made = weights(mode, single=single)
    op = operation(mode, made, biases)
    kept = {"": [], "each": ["b0", "b1", "b2"], "one": ["b"]}[biases]
    gradients = [weight.main_grad for weight in made]
    before = single and biases == "each"  # the order in which parameters are registered
    returned = [*kept, *gradients] if before else [*gradients, *kept]
    nothing = [None] * len(made)
    wanted = [*kept, *nothing] if before else [*nothing, *kept]
    assert te_grouped.settled_parameters(op, returned, lambda weight, gradient: True) == wanted


def test_frozen_weights_stay_unchanged():
    mode = WgradMode(accumulates=True, flagged=True)
    op, ctx = operation(mode, weights(mode)), SimpleNamespace(weight_requires_grad=False)
    nothing = [None] * GROUPS
    assert te_grouped.settled_mlp(lambda fc_op, ctx: nothing)(op, ctx) is nothing
    returned = te_grouped.settled_op(lambda self, contexts: (None, [nothing], [()]))(op, [ctx])
    assert returned == (None, [nothing], [()])


@pytest.mark.parametrize("flagged", (False, True))
def test_an_overwritten_main_grad_is_not_returned_either(flagged, dummies):
    mode = WgradMode(accumulates=True, flagged=flagged)
    made = weights(mode, overwrite=True)
    ctx = SimpleNamespace(weight_requires_grad=True)
    live = [weight.main_grad for weight in made]
    op = operation(mode, made)
    _, (of_op,), _ = te_grouped.settled_op(lambda self, contexts: (None, [live], [()]))(op, [ctx])
    for settled in (of_op, te_grouped.settled_mlp(lambda fc_op, ctx: live)(op, ctx)):
        assert [kind(g, w, dummies) for g, w in zip(settled, made, strict=True)] == [CONTRACT[mode]] * GROUPS


def test_a_gradient_that_is_nowhere_else_is_kept(dummies):
    """2.14 leaves an overwritten main_grad of a single grouped weight as it is and returns the gradient."""
    mode = WgradMode(accumulates=True, flagged=True)
    (weight,) = made = weights(mode, single=True, overwrite=True)
    own = torch.ones_like(weight.data)
    ctx = SimpleNamespace(weight_requires_grad=True)
    assert te_grouped.settled_mlp(lambda fc_op, ctx: [own])(operation(mode, made), ctx) == [own]
    assert weight.grad_added_to_main_grad is False
    (settled,) = te_grouped.settled_mlp(lambda fc_op, ctx: [weight.main_grad])(operation(mode, made), ctx)
    assert kind(settled, weight, dummies) == "dummy"


def grouped_linear(delayed: bool, fused: bool, extra: int, single: bool = False) -> ModuleType:
    """A module with `_GroupedLinear`, which returns the buffers of its weights' gradients, as all releases do.

    extra: how many arguments it takes beside the input, ahead of the weights.
    """
    module = ModuleType("transformer_engine.pytorch.module.grouped_linear")
    count = 1 if single else GROUPS
    named = ", ".join(f"argument{i}" for i in range(extra))
    source = f"""
import torch
class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inp, {named}, *weights_and_biases):
        ctx.save_for_backward(*weights_and_biases)
        ctx.wgrad_store, ctx.fuse_wgrad_accumulation, ctx.num_gemms = store, {fused}, {GROUPS}
        ctx.single_grouped_weight = {single}
        return inp * 2
    @staticmethod
    def backward(ctx, gradient):
        buffers = [torch.full_like(weight, 7) for weight in ctx.saved_tensors[:{count}]]
        biases = [torch.ones_like(bias) for bias in ctx.saved_tensors[{count}:]]
        return gradient * 2, *[None] * {extra}, *buffers, *biases
"""
    module.store = SimpleNamespace(delay_wgrad_compute=lambda: delayed)
    exec(source, vars(module))
    return module


@pytest.mark.parametrize("single", (False, True))
@pytest.mark.parametrize("extra", (1, 2, 4))
@pytest.mark.parametrize("delayed, fused", ((True, False), (True, True), (False, False)))
def test_a_delayed_gradient_is_not_returned_before_it_is_there(monkeypatch, delayed, fused, extra, single):
    module = grouped_linear(delayed, fused, extra, single)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    made = [torch.nn.Parameter(torch.zeros(SHAPE)) for _ in range(1 if single else GROUPS)]
    biases = [torch.nn.Parameter(torch.zeros(2)) for _ in range(GROUPS)]
    x = torch.ones(2, requires_grad=True)

    def gradients() -> tuple:
        for tensor in (x, *made, *biases):
            tensor.grad = None
        module._GroupedLinear.apply(x, *[None] * extra, *made, *biases).sum().backward()
        return [weight.grad for weight in made], [bias.grad for bias in biases], x.grad

    assert all(gradient is not None for gradient in gradients()[0])
    original = vars(module._GroupedLinear)["backward"]
    module._GroupedLinear.backward = te_grouped.nothing_when_delayed(original.__func__)
    of_weights, of_biases, dx = gradients()
    assert [gradient is None for gradient in of_weights] == [delayed and not fused] * len(made)
    assert all(torch.equal(gradient, torch.ones(2)) for gradient in of_biases)
    assert torch.equal(dx, torch.full((2,), 2.0))


@pytest.mark.parametrize("patched, factor", ((True, 1), (False, 2)))
def test_main_grad_itself_as_a_gradient_doubles_it(patched, factor):
    """What the contract is for: Megatron's hook adds weight.grad to main_grad."""
    mode = WgradMode(accumulates=True)
    made = weights(mode)

    def compute_grad_params(fc_op, ctx):
        for weight in made:
            weight.main_grad += 3  # the product of this micro-batch
        return [weight.main_grad.view(SHAPE) for weight in made]

    function = te_grouped.settled_mlp(compute_grad_params) if patched else compute_grad_params

    class Experts(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *weights):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient, *function(operation(mode, made), SimpleNamespace(weight_requires_grad=True))

    def hook(weight: torch.nn.Parameter) -> None:
        if weight.grad is not None:
            weight.main_grad.add_(weight.grad)
            weight.grad = None

    for weight in made:
        weight.register_post_accumulate_grad_hook(hook)
    Experts.apply(torch.ones(1, requires_grad=True), *made).sum().backward()
    assert all(torch.equal(weight.main_grad, torch.full(SHAPE, 3.0 * factor)) for weight in made)
