"""The callbacks of an audit: one takes the norm of every parameter's gradient, one changes weights by rounding."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext

from tp_invariant_recipes.compare.norm_ratios import Norms
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.training.gathering import gathered
from tp_invariant_recipes.training.optimizer_step import AroundOptimizerStep
from tp_invariant_recipes.training.shards import Held, Shards, unwrapped
from tp_invariant_recipes.training.whole_norms import SquaredPart, whole_norms


class GradientNorms(AroundOptimizerStep):
    """Takes the norm of every parameter's gradient as the optimizer sees it: reduced over ranks, not yet clipped.

    A parameter's norm covers the whole of it, over all ranks that hold a part of it; replicas count once. For every
    rank.

    file: where the first rank writes one line a step; None on the others.
    """

    def __init__(self, file: Path | None) -> None:
        self.file = file

    def on_train_start(self, context: CallbackContext) -> None:
        """Learn which parts this rank holds. Raises RunError."""
        self.context = context
        self.number = context.state.train_state.step
        self.shards = _shards(context.model)

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Learn the step's number, counted from 1."""
        self.number = context.state.train_state.step + 1

    @contextmanager
    def around_optimizer_step(self) -> Iterator[None]:
        """Take the norms and write them down."""
        ours = _parts(self.shards.gradients(self.context.optimizer))
        everyone = gathered((ours, _graphs(self.context.model)))
        if self.file:
            norms = whole_norms(part for parts, _ in everyone for part in parts)
            line = Norms(self.number, sum(graphs for _, graphs in everyone), norms)
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line.as_json()) + "\n")
        yield


class Rounded(Callback):
    """Changes every weight by about one unit in its last place, up or down in turn, before each step from `first` on.

    It depends on the weight and its place in the tensor alone, so that replicas stay equal.
    """

    def __init__(self, first: int) -> None:
        self.first = first

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Change them."""
        if context.state.train_state.step + 1 < self.first:
            return
        with torch.no_grad():
            for chunk in context.model:
                for parameter in unwrapped(chunk).parameters():
                    flat, unit = parameter.data.view(-1), torch.finfo(parameter.dtype).eps
                    flat[0::2].mul_(1 + unit)
                    flat[1::2].mul_(1 - unit)


def _shards(model: Iterable[Any]) -> Shards:
    try:
        return Shards(model)
    except RunError as error:
        which = [line for line in str(error).splitlines() if line.startswith("  ")]
        raise RunError(
            "\n".join(["an audit cannot tell where these tensors lie in the whole model:", *which])
        ) from error


def _parts(held: list[Held]) -> list[SquaredPart]:
    if not held:
        return []
    norms = [torch.linalg.vector_norm(part.values, dtype=torch.float64) for part in held]
    squares = np.square(torch.stack(norms).cpu().numpy()).tolist()
    return [(part.name, part.shape, part.place, square) for part, square in zip(held, squares, strict=True)]


def _graphs(model: Iterable[Any]) -> int:
    """How many CUDA graphs this rank replays: modules that Transformer Engine has captured, and the whole step."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    modules = sum(bool(getattr(module, "cuda_graphs", None)) for chunk in model for module in chunk.modules())
    return modules + (FullCudaGraphWrapper.cuda_graph.get("training") is not None)
