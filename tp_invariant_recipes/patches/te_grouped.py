# SPDX-License-Identifier: Apache-2.0
"""GroupedLinear in an FP8 CUDA graph repeats its behaviour at capture in every micro-batch of a replay.

Transformer Engine passes a flag tensor to the modules of a captured graph; at every replay the graph reads from it
whether to quantise the weights again. GroupedLinear passes None to its autograd function instead of that tensor and
so keeps the `is_first_microbatch` of the capture. Captured with True, every micro-batch overwrites `main_grad`, so a
step ends with the gradient of the last micro-batch. Captured with False, changed weights are never quantised again.

The fix follows Linear: pass the tensor, and treat no micro-batch of a graph as the first. Gradients then always
accumulate, into a `main_grad` that Megatron zeroes before each step.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tp_invariant_recipes.patches.patch import Function, Patch

if TYPE_CHECKING:
    from tp_invariant_recipes.settings.run_config import RunConfig

MODULE = "transformer_engine"
FILE = "pytorch/module/grouped_linear.py"
ARGUMENTS, FLAG = "non_tensor_args", "skip_fp8_weight_update"


def on_gpus(wants: Callable[[dict[str, Any]], Any]) -> "Callable[[RunConfig], bool]":
    """`Patch.reached` of runs on a GPU whose `model` section makes `wants` true."""
    return lambda config: config.device.kind == "gpu" and bool(wants(config.model))


def loads() -> bool:
    """Whether Transformer Engine can be imported. Megatron, too, works without it when its libraries are missing."""
    try:
        import_module(f"{MODULE}.pytorch")
    except (ImportError, OSError):
        return False
    return True


def flag() -> Any:
    """Get the flag tensor, fp32 [1], during warm-up or capture of a graph with cached FP8 weights; otherwise None."""
    from transformer_engine.pytorch.module.grouped_linear import FP8GlobalStateManager

    if not FP8GlobalStateManager.fp8_graph_capturing():
        return None
    return FP8GlobalStateManager.get_skip_fp8_weight_update_tensor()


def never_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """`GroupedLinear.forward` that captures no micro-batch as the first."""

    @wraps(original)
    def forward(self: Any, inp: Any, m_splits: Any, is_first_microbatch: bool | None = None) -> Any:
        return original(self, inp, m_splits, is_first_microbatch if flag() is None else False)

    return forward


def with_flag(original: Callable[..., Any]) -> Any:
    """`_GroupedLinear.forward` with the flag tensor instead of the module's None."""
    place = place_of_flag(original)

    @wraps(original)
    def forward(ctx: Any, inp: Any, non_tensor_args: tuple, *weights_and_biases: Any) -> Any:
        if (tensor := flag()) is not None:
            non_tensor_args = (*non_tensor_args[:place], tensor, *non_tensor_args[place + 1 :])
        return original(ctx, inp, non_tensor_args, *weights_and_biases)

    return staticmethod(forward)


def place_of_flag(function: Callable[..., Any]) -> int:
    """Return the flag's index among a function's packed arguments.

    Raises ValueError when the function unpacks no flag.
    """
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id == ARGUMENTS:
            names = [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            return names.index(FLAG)
    raise ValueError(f"{function.__qualname__} does not unpack {ARGUMENTS}")


PATCH = Patch(
    name="te-grouped-linear-graph",
    versions="<2.17",
    functions=(
        Function(
            FILE,
            "GroupedLinear.forward",
            {
                "2.11.0": "da60b43bee7e4890",
                "2.12.0, 2.13.0": "aa34c58d7b975aee",
                "2.14.0, 2.14.1": "0aa6fa3e3229b8ac",
                "2.15.0, 2.16.0, 2.16.1": "c843845d0bd5a251",
            },
        ),
        Function(
            FILE,
            "_GroupedLinear.forward",
            {
                "2.11.0": "6873e3dd30829738",
                "2.12.0, 2.13.0": "95e1e15f9678dc48",
                "2.14.0, 2.14.1": "54f10feb350c7138",
                "2.15.0": "d102abdfbb031b05",
                "2.16.0, 2.16.1": "f2f962009fb4df33",
            },
        ),
    ),
    replaces={
        f"{MODULE}.pytorch.module.grouped_linear:GroupedLinear.forward": never_first,
        f"{MODULE}.pytorch.module.grouped_linear:_GroupedLinear.forward": with_flag,
    },
    why="a replayed CUDA graph keeps the is_first_microbatch of its capture: every micro-batch overwrites the gradient "
    "of the experts' weights, or their FP8 copies are never updated",
    upstream="https://github.com/NVIDIA/TransformerEngine/issues/3051",
    reached=on_gpus(lambda model: model.get("cuda_graph_impl") not in (None, "none")),
    loads=loads,
)


DISCUSSED = "https://github.com/NVIDIA/TransformerEngine/pull/2871"


def settled(weight: Any, returned: Any, delayed: bool, accumulated: bool) -> Any:
    """Return the value that autograd gets for `weight` instead of the layer's returned value.

    delayed: `backward_dw()` computes the gradient later. accumulated: the layer writes it into `main_grad`.
    """
    if not (delayed or accumulated):
        return returned
    if not (accumulated and hasattr(weight, "grad_added_to_main_grad")):
        return None
    from transformer_engine.pytorch.module.base import get_dummy_wgrad

    weight.grad_added_to_main_grad = True
    return get_dummy_wgrad(list(weight.size()), weight.dtype, zero=getattr(weight, "zero_out_wgrad", False))


def within_main_grad(returned: Any, weight: Any) -> bool:
    """Whether a tensor is `main_grad` or a view of it."""
    return returned.untyped_storage().data_ptr() == weight.main_grad.untyped_storage().data_ptr()


def nothing_when_delayed(original: Callable[..., tuple]) -> Any:
    """`_GroupedLinear.backward` that returns None instead of the unwritten buffer of a delayed gradient."""

    @wraps(original)
    def backward(ctx: Any, *gradients: Any) -> tuple:
        returned = original(ctx, *gradients)
        delayed = ctx.wgrad_store is not None and ctx.wgrad_store.delay_wgrad_compute()
        if not delayed or ctx.fuse_wgrad_accumulation:
            return returned
        weights = 1 if getattr(ctx, "single_grouped_weight", False) else ctx.num_gemms
        from transformer_engine.pytorch.module.grouped_linear import _GroupedLinear

        kinds = [parameter.kind for parameter in inspect.signature(_GroupedLinear.forward).parameters.values()]
        start = kinds.index(inspect.Parameter.VAR_POSITIONAL) - 1
        return (*returned[:start], *[None] * weights, *returned[start + weights :])

    return staticmethod(backward)


def settled_op(original: Callable[..., tuple]) -> Callable[..., tuple]:
    """`GroupedLinear.fuser_backward` of the operations, which always obeys `_accumulate_into_main_grad`."""

    @wraps(original)
    def fuser_backward(self: Any, basic_op_ctxs: list, *arguments: Any, **keywords: Any) -> tuple:
        grad_input, (parameters,), extra = original(self, basic_op_ctxs, *arguments, **keywords)
        if basic_op_ctxs[0].weight_requires_grad:
            parameters = settled_parameters(self, parameters, lambda weight, returned: self._accumulate_into_main_grad)
        return grad_input, [parameters], extra

    return fuser_backward


def settled_mlp(original: Callable[..., list]) -> Callable[..., list]:
    """`_compute_grad_params` of the fused grouped MLP."""

    @wraps(original)
    def compute_grad_params(fc_op: Any, ctx: Any, *arguments: Any, **keywords: Any) -> list:
        parameters = original(fc_op, ctx, *arguments, **keywords)
        if not ctx.weight_requires_grad:
            return parameters

        def accumulates(weight: Any, returned: Any) -> bool:
            if not (fc_op.single_grouped_weight and getattr(weight, "overwrite_main_grad", False)):
                return fc_op._accumulate_into_main_grad
            # With overwrite_main_grad, 2.14 does not write into the main_grad of a single grouped weight.
            added = getattr(weight, "grad_added_to_main_grad", False)
            return added or (returned is not None and within_main_grad(returned, weight))

        return settled_parameters(fc_op, parameters, accumulates)

    return compute_grad_params


def settled_parameters(op: Any, returned: Sequence[Any], accumulates: Callable[[Any, Any], bool]) -> list:
    """Return the returned gradients of an operation's parameters, with those of the weights corrected.

    returned:    in the parameters' order of registration: weights before biases, but a single grouped weight after
                 separate biases.
    accumulates: (weight, its returned gradient) -> whether the gradient is in `main_grad`.
    """
    single = getattr(op, "single_grouped_weight", False)
    weights = [op.weight] if single else [getattr(op, f"weight{group}") for group in range(op.num_groups)]
    start = op.num_groups if single and op.has_bias and not op.single_grouped_bias else 0
    store = getattr(op, "wgrad_store", None)
    delayed = store is not None and store.delay_wgrad_compute()
    pairs = zip(weights, returned[start : start + len(weights)], strict=True)
    settled_ones = [settled(weight, gradient, delayed, accumulates(weight, gradient)) for weight, gradient in pairs]
    return [*returned[:start], *settled_ones, *returned[start + len(weights) :]]


_FUSED_OPERATIONS = on_gpus(lambda model: model.get("use_transformer_engine_op_fuser"))

PATCHES = (
    Patch(
        name="te-grouped-linear-delayed-wgrad",
        versions=">=2.11",
        functions=(
            Function(
                FILE,
                "_GroupedLinear.backward",
                {
                    "2.11.0 to 2.14.1": "fb01fbea80b2ff90",
                    "2.15.0": "807e1115ea6ce537",
                    "2.16.0, 2.16.1": "fa6416acf866ba7b",
                    "2.17.0, 2.17.1": "5412440c994868d0",
                    "2.18.0": "b4272f7a032d964d",
                    "2.19.0": "8d72841c97ebb6bb",
                    "2.20.2": "1ed992848d4f4128",
                },
            ),
        ),
        replaces={f"{MODULE}.pytorch.module.grouped_linear:_GroupedLinear.backward": nothing_when_delayed},
        why="with delayed weight gradients and no accumulation, autograd takes a buffer before it is written as the "
        "gradient and passes it to hooks",
        upstream=DISCUSSED,
        reached=on_gpus(
            lambda model: model.get("delay_wgrad_compute") or model.get("overlap_dispatch_backward_with_experts_wgrad")
        ),
        loads=loads,
    ),
    Patch(
        name="te-grouped-op-wgrad",
        versions=">=2.13,<2.16",
        functions=(
            Function(
                "pytorch/ops/basic/grouped_linear.py",
                "GroupedLinear.fuser_backward",
                {"2.13.0": "20bc2c5449843b6d", "2.14.0, 2.14.1": "823005f9ee562d6d", "2.15.0": "1d7ae770ba5c4de4"},
            ),
        ),
        replaces={f"{MODULE}.pytorch.ops.basic.grouped_linear:GroupedLinear.fuser_backward": settled_op},
        why="with delayed weight gradients autograd gets None for a gradient in main_grad, which Megatron refuses when "
        "it overlaps the reduction of gradients; with overwrite_main_grad the layer returns main_grad itself, which "
        "doubles it",
        upstream=DISCUSSED,
        reached=_FUSED_OPERATIONS,
        loads=loads,
    ),
    Patch(
        name="te-grouped-mlp-wgrad",
        versions=">=2.14,<2.16",
        functions=(
            Function(
                "pytorch/ops/fused/backward_grouped_mlp.py",
                "_compute_grad_params",
                {"2.14.0, 2.14.1": "e40e83bb7a6e6258", "2.15.0": "a9fbacde32de0747"},
            ),
        ),
        replaces={f"{MODULE}.pytorch.ops.fused.backward_grouped_mlp:_compute_grad_params": settled_mlp},
        why="the layer returns main_grad itself as the gradient of the experts' weights, which adds it to itself: "
        "doubled",
        upstream=DISCUSSED,
        reached=_FUSED_OPERATIONS,
        loads=loads,
    ),
)
