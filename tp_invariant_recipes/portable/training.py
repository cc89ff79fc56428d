# SPDX-License-Identifier: Apache-2.0
"""What stands for functions of the training loop in numerics=portable: the loss, the optimizer and the schedule."""

import math
from decimal import Decimal, localcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tp_invariant_recipes.kernels.clipped_adam import Settings
from tp_invariant_recipes.kernels.tree_add import tree_add
from tp_invariant_recipes.portable.ieee.adam import CLIPPED, adam_step

REFUSED = ("amsgrad", "maximize", "capturable", "differentiable")


def masked_next_token_loss(original: Any) -> Any:
    """Return a replacement for Bridge's function, which adds the losses of a micro-batch in torch's order."""

    def loss_function(loss_mask: Tensor, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        losses = output_tensor.view(-1).float()
        weights = loss_mask.view(-1).float()
        loss = _Sum.apply(losses * weights)
        _, count, _ = original(
            torch.ones_like(weights[:1]), loss.detach().view(1), *args, **kwargs
        )  # its checks of the loss
        count = weights.sum().detach().to(torch.int)  # whole numbers: exact
        # fp64: the sum over micro-batches, which Bridge adds, is exact.
        reported = torch.cat([loss.detach().double().view(1), count.double().view(1)])
        return loss, count, {"lm loss": reported}

    return loss_function


class _Sum(torch.autograd.Function):
    """The sum of a row of numbers, filled with zeros to a power of two, in tree order."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.size = values.numel()
        filled = values.new_zeros(1 << max(0, ctx.size - 1).bit_length(), 1)
        filled[: ctx.size, 0] = values
        while filled.shape[0] > 1:
            groups = filled.shape[0] // min(64, filled.shape[0])
            filled = tree_add(filled.view(groups, -1, 1), filled.new_empty(groups, 1), groups)
        return filled[0, 0].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].expand(ctx.size)


def scale(chunk: int, overflow: Tensor, tensors: list[list[Tensor]], factor: float) -> None:
    """Megatron's multi_tensor_scale, by IEEE products: in Transformer Engine's subnormal gradients are zeros."""
    for source, target in zip(*tensors, strict=True):
        torch.mul(source, factor, out=target)


def portable_adam(original: type) -> type:
    """torch's Adam or AdamW with the step of portable/ieee/adam.py; its state has the same names and shapes."""

    class PortableAdam(original):
        one_launch = CLIPPED  # for numerics/megatron/optimizer_step.py, like the last three functions

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            """One step of every parameter with a gradient."""
            if closure is not None:
                raise NotImplementedError("a portable optimizer takes no closure")
            for group in self.param_groups:
                if any(group.get(name) for name in REFUSED):
                    raise NotImplementedError(f"a portable optimizer has none of {', '.join(REFUSED)}")
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step_parameter(parameter, parameter.grad.contiguous(), group)

        def _step_parameter(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["step"] += 1
            numbers = CLIPPED.numbers(Settings(int(state["step"]), *(group[name] for name in Settings._fields[1:])))
            tensors = (parameter, gradient, state["exp_avg"], state["exp_avg_sq"])
            p, g, m, v = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
            adam_step(p, g, m, v, numbers, self._decoupled(group))

        def _decoupled(self, group: dict[str, Any]) -> bool:
            return bool(group.get("decoupled_weight_decay", original is torch.optim.AdamW))

        def is_plain_adamw(self) -> bool:
            """Whether all groups have AdamW's settings, and each group's parameters as many steps, one at least."""
            return all(
                self._decoupled(group)
                and not any(group.get(name) for name in REFUSED)
                and len({float(step) for step in self._steps(group)}) < 2
                and all(self._steps(group))
                for group in self.param_groups
            )

        def count_step(self, group: dict[str, Any]) -> int:
            """Count a step of a group's parameters with a gradient, and return its number; 0: there are none."""
            steps = self._steps(group)
            for step in steps:
                step += 1
            return int(steps[0]) if steps else 0

        def _steps(self, group: dict[str, Any]) -> list[Tensor]:
            with_gradients = (parameter for parameter in group["params"] if parameter.grad is not None)
            return [self.state.get(parameter, {}).get("step", torch.tensor(0.0)) for parameter in with_gradients]

        @staticmethod
        def one_by_one(p: Tensor, g: Tensor, m: Tensor, v: Tensor, clip: float, settings: Settings) -> None:
            """Clip and step by the kernels that the launch stands for."""
            scale(0, g, [[g], [g]], clip)
            adam_step(p, g, m, v, CLIPPED.numbers(settings))

    PortableAdam.__name__ = original.__name__
    return PortableAdam


def portable_math(original: Any) -> Any:
    """Return a replacement for the module `math` in Megatron's schedules, which take a cosine from it."""
    return SimpleNamespace(pi=math.pi, cos=cosine, sqrt=math.sqrt)


def cosine(x: float) -> float:
    """Return the fp64 number nearest to cos(x), for |x| below 10; a library's last bit depends on the machine."""
    with localcontext() as context:
        context.prec = 60
        square, term, total = Decimal(x) ** 2, Decimal(1), Decimal(1)
        for n in range(1, 60, 1):
            term = -term * square / ((2 * n - 1) * (2 * n))
            total += term
        return float(total)
