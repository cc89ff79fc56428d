# SPDX-License-Identifier: Apache-2.0
"""Faults of hardware: one bit of what one rank computes or keeps, once or whenever it does so from a step on."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip(tensor: torch.Tensor, at: int, bit: int, width: int = 1) -> None:
    """One bit of an element or of several adjacent ones, in place."""
    flat = tensor.data.view(-1) if tensor.is_contiguous() else tensor.data.reshape(-1)
    words = flat.view(WORDS[flat.element_size()])
    words[at % len(words) :][:width] ^= 1 << bit % (8 * flat.element_size() - 1)
    if not tensor.is_contiguous():
        tensor.data.copy_(flat.view(tensor.shape))


@dataclass(frozen=True)
class Planted:
    """What is wrong. kernel: a key of KERNELS. always: at every launch from `step` on; else at the `launch`-th of it.

    element, bit: what is flipped, of the result. width: of how many elements.
    """

    kernel: str
    always: bool = False
    step: int = 2
    rank: int = 1
    launch: int = 0
    element: int = 5
    bit: int = 20  # survives the rounding to bf16
    width: int = 1

    def plant(self) -> None:
        """To be run before the command."""
        now = _Now(self)
        _count_steps(now)
        KERNELS[self.kernel](now)


class _Now:
    """Whether a launch is wrong."""

    def __init__(self, fault: Planted) -> None:
        self.fault, self.step, self.launches = fault, 0, 0

    def spoil(self, result: Any) -> Any:
        fault = self.fault
        if os.environ.get("RANK") != str(fault.rank) or self.step < fault.step:
            return result
        self.launches += 1
        if fault.always or (self.launches - 1 == fault.launch):
            with torch.no_grad():
                flip(result[0] if isinstance(result, tuple) else result, fault.element, fault.bit, fault.width)
        return result


def _count_steps(now: _Now) -> None:
    from tp_invariant_recipes.observe.optimizer_step import OptimizerStep

    original = getattr(OptimizerStep, "on_train_step_start", lambda self, context: None)

    def on_train_step_start(self, context):
        now.step = context.state.train_state.step + 1
        return original(self, context)

    OptimizerStep.on_train_step_start = on_train_step_start


def _function(module: str, path: str) -> Callable[[_Now], None]:
    """Spoil what a function returns."""

    def plant(now: _Now) -> None:
        *parents, name = path.split(".")
        holder = import_module(module)
        for parent in parents:
            holder = getattr(holder, parent)
        original = getattr(holder, name)
        setattr(holder, name, lambda *args, **kwargs: now.spoil(original(*args, **kwargs)))

    return plant


def _contraction(now: _Now) -> None:
    """Spoil the sum of a contraction before the guard samples it."""
    from tp_invariant_recipes.numerics.gemm import sampling

    take = sampling.take_partials
    sampling.take_partials = lambda a, b, summed, *cut: take(a, b, now.spoil(summed), *cut)


def _norm(now: _Now) -> None:
    from tp_invariant_recipes.numerics.layers import norm

    library = norm.LIBRARY
    norm.LIBRARY = library._replace(forward=lambda *args: now.spoil(library.forward(*args)))


def _norm_of_heads(now: _Now) -> None:
    """Spoil the gradient that a norm of queries or keys gives: it comes after the routers' of the same layer."""
    from tp_invariant_recipes.numerics.layers import norm

    library = norm.LIBRARY

    def backward(*args: Any) -> Any:
        result = library.backward(*args)
        return now.spoil(result) if args[-1] else result

    norm.LIBRARY = library._replace(backward=backward)


def _activation(now: _Now) -> None:
    from megatron.core.transformer.mlp import MLP

    original = MLP.forward

    def forward(self, *args, **kwargs):
        activation = self.config.activation_func
        self.config.activation_func = lambda x: now.spoil(activation(x))
        try:
            return original(self, *args, **kwargs)
        finally:
            self.config.activation_func = activation

    MLP.forward = forward


def _after_the_update(kind: str, when: str) -> Callable[[_Now], None]:
    """Spoil what a rank keeps of the first parameter: within the optimizer's step, or as the step ends."""

    def spoil(now: _Now, optimizer: Any) -> None:
        from tp_invariant_recipes.observe.optimizer_state import OptimizerState

        slot = OptimizerState(optimizer).slots[0]
        tensor = {"master": slot.updated, "weight": slot.owner}.get(kind)
        now.spoil(slot.state[kind] if tensor is None else tensor)

    def plant(now: _Now) -> None:
        from tp_invariant_recipes.observe.optimizer_step import OptimizerStep

        start = OptimizerStep.on_train_start

        def on_train_start(self, context):
            step = context.optimizer.step

            def wrapped(*args, **kwargs):
                result = step(*args, **kwargs)
                if when == "within":
                    spoil(now, context.optimizer)
                return result

            context.optimizer.step = wrapped
            start(self, context)

        def on_train_step_end(self, context):
            if when == "after":
                spoil(now, context.optimizer)

        OptimizerStep.on_train_start, OptimizerStep.on_train_step_end = on_train_start, on_train_step_end
        OptimizerStep.restore = lambda self: None

    return plant


def _defined(now: _Now) -> None:
    """Spoil what the backend of numerics=portable computes, before a sample is taken of it."""
    from tp_invariant_recipes.numerics.gemm import defined

    by_numba = defined.by_numba

    def compute(a, b, out, add):
        by_numba(a, b, out, add)
        whole = out.contiguous()
        out.copy_(now.spoil(whole))

    defined.by_numba = compute


KERNELS: dict[str, Callable[[_Now], None]] = {
    "product": _function("tp_invariant_recipes.numerics.gemm.cpu", "gemm"),
    "contraction": _contraction,
    "attention": _function("tp_invariant_recipes.numerics.layers.attention", "_batched"), "norm": _norm,
    "norm of heads": _norm_of_heads, "activation": _activation,
    "experts": _function("tp_invariant_recipes.numerics.layers.formats.plain", "Plain.multiply_groups"),
    "adam": _after_the_update("master", "within"), "moment": _after_the_update("exp_avg", "within"),
    "all-gather": _after_the_update("weight", "within"), "memory": _after_the_update("master", "after"),
    "defined": _defined,
}  # fmt: skip


@dataclass(frozen=True)
class InTransit:
    """What a rank receives is wrong, once: of the `number`-th call of a method of torch's ProcessGroup in a step.

    fault: "flip" a bit, "swap" two pieces, "zeros", or "stale": what arrived a step before.
    """

    method: str
    fault: str
    step: int = 2
    rank: int = 1
    number: int = 0

    def plant(self) -> "_Now":
        """To be run before the command. Returns what knows the step."""
        now = _Now(self)  # type: ignore[arg-type]
        _count_steps(now)
        original = getattr(torch.distributed.ProcessGroup, self.method)
        calls = [0, 0]  # the step, and how many calls it has had
        before: list[torch.Tensor] = []

        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            work = original(group, *args, **kwargs)
            calls[:] = (now.step, 0) if now.step != calls[0] else (calls[0], calls[1] + 1)
            if os.environ.get("RANK") == str(self.rank) and calls[1] == self.number:
                work.wait()
                pieces = [piece.detach() for piece in _received(self.method, group, args)]
                held = [piece.clone() for piece in pieces]
                if now.step == self.step:
                    self._spoil(pieces, before)
                before[:] = held
                return Done()
            return work

        setattr(torch.distributed.ProcessGroup, self.method, method)
        return now

    def _spoil(self, pieces: list[torch.Tensor], before: list[torch.Tensor]) -> None:
        other = (self.rank + 1) % len(pieces)
        if self.fault == "flip":
            flip(pieces[other], 5, 3)
        elif self.fault == "zeros":
            pieces[other].zero_()
        elif self.fault == "stale":
            rows = min(len(pieces[other]), len(before[other]))
            pieces[other][:rows].copy_(before[other][:rows])
        else:
            halves = [*pieces[0].view(-1).chunk(2)]  # of a single message
            two = (other + 2) % len(pieces) if len(pieces) > 2 else self.rank
            pair = halves if len(pieces) == 1 else [pieces[other], pieces[two]]
            one, two = (piece[: min(map(len, pair))] for piece in pair)
            held = one.clone()
            one.copy_(two)
            two.copy_(held)


def compared(net: Any, group: Any = None) -> Any:
    """What a CollectiveNet finds in its last step. group: of Gloo."""
    total = torch.tensor(net.unbalanced())
    torch.distributed.all_reduce(total, group=group)
    return net.unlike(group) if int(total) else None


class Done:
    """A Work that has been waited for."""

    def wait(self) -> bool:
        return True


def _received(method: str, group: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The pieces that a call fills, by the rank that sends them."""
    output = args[0]
    if method in ("allgather", "alltoall", "recv", "broadcast"):
        return output[0] if method == "allgather" else output
    if method == "allgather_into_tensor_coalesced":
        output = output[0]
    sizes = args[2] if method == "alltoall_base" and args[2] else len(output) // group.size()
    return list(output.split(sizes))
