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
from collections.abc import Callable
from functools import wraps
from typing import Any

from tp_invariant_recipes.patches.patch import Function, Patch, Versions
from tp_invariant_recipes.patches.transformer_engine import MODULE, PACKAGE, loads, on_gpus

FILE = "pytorch/module/grouped_linear.py"
ARGUMENTS, FLAG = "non_tensor_args", "skip_fp8_weight_update"


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
