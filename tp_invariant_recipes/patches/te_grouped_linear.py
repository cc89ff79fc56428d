"""GroupedLinear under FP8 CUDA graphs does what it did when it was captured, in every micro-batch of a replay.

Transformer Engine tells the modules of a captured graph through a tensor whether to quantise their weights anew: the
graph reads it at every replay. GroupedLinear hands its autograd function None in the place of that tensor, and with
it keeps the `is_first_microbatch` of the capture: True overwrites `main_grad` in every micro-batch, so that a step
ends with the gradient of the last one; False never quantises changed weights.

The cure is what Linear does: take the tensor, and call every micro-batch of a graph not the first. Gradients then
always accumulate, into a `main_grad` that Megatron zeroes before each step.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import wraps
from typing import Any

from tp_invariant_recipes.patches.patch import Function, Patch, Versions
from tp_invariant_recipes.patches.transformer_engine import MODULE, PACKAGE, for_runs
from tp_invariant_recipes.replacement import Replacement

FILE = "pytorch/module/grouped_linear.py"
ARGUMENTS, FLAG = "non_tensor_args", "skip_fp8_weight_update"
WHY = (
    "a replayed CUDA graph keeps the first micro-batch of its capture: every micro-batch overwrites the gradient of "
    "the experts' weights, or their FP8 copies are never renewed"
)


def flag() -> Any:
    """The tensor, fp32 [1], while a graph with cached FP8 weights is warmed up or captured; otherwise None."""
    from transformer_engine.pytorch.module.grouped_linear import FP8GlobalStateManager as state

    return state.get_skip_fp8_weight_update_tensor() if state.fp8_graph_capturing() else None


def never_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """`GroupedLinear.forward`: what a graph captures is no first micro-batch."""

    @wraps(original)
    def forward(self: Any, inp: Any, m_splits: Any, is_first_microbatch: bool | None = None) -> Any:
        return original(self, inp, m_splits, is_first_microbatch if flag() is None else False)

    return forward


def with_flag(original: Callable[..., Any]) -> Any:
    """`_GroupedLinear.forward`: the tensor goes where the module has put None."""
    place = place_of_flag(original)

    @wraps(original)
    def forward(ctx: Any, inp: Any, non_tensor_args: tuple, *weights_and_biases: Any) -> Any:
        if (tensor := flag()) is not None:
            non_tensor_args = (*non_tensor_args[:place], tensor, *non_tensor_args[place + 1 :])
        return original(ctx, inp, non_tensor_args, *weights_and_biases)

    return staticmethod(forward)


def place_of_flag(function: Callable[..., Any]) -> int:
    """Which of its packed arguments a function unpacks as the flag. Raises ValueError when it unpacks none so."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id == ARGUMENTS:
            names = [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            return names.index(FLAG)
    raise ValueError(f"{function.__qualname__} does not unpack {ARGUMENTS}")


PATCH = Patch(
    name="te-grouped-linear-graph",
    package=PACKAGE,
    need=Versions(
        MODULE,
        "<2.17",
        (
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
    ),
    replacements=(
        Replacement(f"{MODULE}.pytorch.module.grouped_linear:GroupedLinear.forward", never_first, WHY),
        Replacement(f"{MODULE}.pytorch.module.grouped_linear:_GroupedLinear.forward", with_flag, WHY),
    ),
    why=WHY,
    upstream="https://github.com/NVIDIA/TransformerEngine/issues/3051",
    concerns=for_runs(lambda model: model.get("cuda_graph_impl") not in (None, "none")),
)
