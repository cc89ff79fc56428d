# SPDX-License-Identifier: Apache-2.0
"""The callback that writes down what a training computed, for an audit: one file a rank and step (ledger/dumps.py).

weights/PARAMETER        before the first step, of a run that is not dithered
forward/MODULE/output    what a module returned, over all micro-batches
backward/MODULE/output   the gradient that it sent to its input
gradients/PARAMETER      reduced over ranks, as the optimizer sees it, before clipping
norm/gradients           the gradient norm that the optimizer reports
share/loss               over how many ranks gradients are averaged, so that each scales its own loss up by it
updates/PARAMETER        what the step added to the master weight, or to the weight where there is no master
reports/NAME             a loss that the step reports, or the evaluation after it ("evaluation lm loss")
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.training.callbacks import CallbackContext

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.features.audit.expert_choices import ExpertChoices
from tp_invariant_recipes.kernels.launch import TensorPart
from tp_invariant_recipes.ledger.dumps import GRADIENT_NORM, LOSS_SHARE
from tp_invariant_recipes.observe.digests.sums import dtype_name
from tp_invariant_recipes.observe.dithering import Dither
from tp_invariant_recipes.observe.dump_writer import DumpWriter
from tp_invariant_recipes.observe.module_hooks import ModuleHooks, tensor_names
from tp_invariant_recipes.observe.optimizer_state import OptimizerState
from tp_invariant_recipes.observe.optimizer_step import AroundOptimizerStep
from tp_invariant_recipes.observe.placement import Site
from tp_invariant_recipes.observe.shards import Shards, unwrapped
from tp_invariant_recipes.observe.trace import site_of
from tp_invariant_recipes.observe.union import gathered


class AuditRecording(AroundOptimizerStep):
    """Records some steps, counted from 1. For every rank.

    folder: where `dumps/` is written.
    dither: the seed of a dithered run; None: computed as it is.
    follow: the folder of the recording whose choices of experts this run takes; None: its own.
    site:   where the rank stands in the step that begins.
    """

    def __init__(
        self,
        folder: Path,
        steps: range,
        dither: int | None = None,
        follow: Path | None = None,
        site: Callable[[Any], Site] = site_of,
    ) -> None:
        self.folder, self.steps, self.seed, self.follow, self.site = folder, steps, dither, follow, site
        self._dither: Dither | None = None
        self._choices: ExpertChoices | None = None
        self._hooks: ModuleHooks | None = None
        self._unwritten = False

    def on_train_start(self, context: CallbackContext) -> None:
        """Learn which parts this rank holds. RunError: Megatron does not say where a parameter lies."""
        self._context = context
        self._chunks = [unwrapped(chunk) for chunk in context.model]
        self._shards = _shards(context.model)
        self._updated = self._weights()
        self._writer = DumpWriter(self.folder, dist.get_rank(), dist.get_world_size())
        if self.seed is not None:
            self._dither = Dither(self._chunks, self.seed)

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Register hooks on every module, if the step is recorded."""
        self._write()
        self._step = context.state.train_state.step + 1
        if self._step not in self.steps:
            return
        names = set().union(*map(tensor_names, self._chunks))
        outputs = frozenset(name for name in names if name.rpartition("/")[2].startswith("output"))
        if self._step == 1 and self._dither is None:
            for part in self._shards.weights():
                self._add("weights", part)
        site = self.site(context)
        self._hooks = ModuleHooks(site, self._step, outputs, self._writer)
        self._hooks.digested = False
        self._choices = ExpertChoices(self._writer, self._step, site, self.follow)
        for chunk in self._chunks:
            self._hooks.hook(chunk)
            self._choices.hook(chunk)

    @contextmanager
    def around_optimizer_step(self) -> Iterator[None]:
        """Record gradients, and what the optimizer adds to the weights."""
        if self._step not in self.steps:
            yield
            return
        for part in self._shards.gradients(self._context.optimizer):
            self._add("gradients", part)
        before = [part.values.to("cpu", torch.float32, copy=True) for part in self._updated]
        yield
        for part, value in zip(self._updated, before, strict=True):
            self._add("updates", part, part.values.to("cpu", torch.float32) - value)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Take the hooks off."""
        if self._step not in self.steps:
            return
        assert self._hooks is not None  # since the step's start
        assert self._choices is not None
        self._hooks.unhook()
        self._choices.unhook()
        if context.grad_norm is not None:
            self._number(GRADIENT_NORM, float(context.grad_norm))
        site = self._hooks.site
        self._number(LOSS_SHARE, _share(context.model[0], site))
        self._reported(context.loss_dict)
        self._unwritten = True

    def on_eval_end(self, context: CallbackContext) -> None:
        """Record what the evaluation after a recorded step reports."""
        if self._unwritten:
            self._reported(context.total_loss_dict, "evaluation ")

    def on_train_end(self, context: CallbackContext) -> None:
        """Write the last step."""
        self._write()

    def _reported(self, losses: Any, prefix: str = "") -> None:
        for name, value in (losses or {}).items():
            if torch.is_tensor(value) and value.numel() == 1:
                self._number(f"reports/{prefix}{name}", float(value))

    def _write(self) -> None:
        """Write the file of the step that has ended."""
        if self._unwritten:
            self._writer.close_step(self._step)
        self._unwritten = False

    def close(self) -> None:
        """Write what is recorded, and take all hooks off, so that the next training in this process has none."""
        self._write()
        for hooks in (self._hooks, self._choices):
            if hooks is not None:
                hooks.unhook()
        if self._dither is not None:
            self._dither.unhook()

    def _weights(self) -> list[TensorPart]:
        """Return the master weights, and the weights that have none."""
        masters = OptimizerState(self._context.optimizer).masters()
        held = self._shards.held(masters)
        names = set[str]().union(*gathered({part.name for part in held}))
        return [*held, *(part for part in self._shards.weights() if part.name not in names)]

    def _number(self, name: str, value: float) -> None:
        self._writer.add(name, "float32", (1,), TensorPart(torch.tensor([[value]], dtype=torch.float32), 0, 0))

    def _add(self, kind: str, part: TensorPart, values: Any = None) -> None:
        piece = part if values is None else part._replace(values=values)
        self._writer.add(f"{kind}/{part.name}", dtype_name(piece.values), part.shape, piece)


def _share(model: Any, site: Site) -> float:
    """Over how many ranks Megatron averages gradients. model: a chunk, wrapped by DDP."""
    if site.config.calculate_per_token_loss:
        return 1
    if hasattr(model, "shard_counters"):  # of the invariant numerics, which may divide the loss instead
        return 1 / model.buffers[0].buckets[0].gradient_scaling_factor
    return site.dp * site.cp


def _shards(model: Any) -> Shards:
    try:
        return Shards(model)
    except RunError as error:
        which = [line for line in str(error).splitlines() if line.startswith("  ")]
        raise RunError(
            "\n".join(["an audit cannot tell where these tensors lie in the whole model:", *which])
        ) from error
