"""The hidden states of one sequence, layer by layer, and what rounding moves there: the reference of `--hidden`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.features.score.batches import Batch, padded
from tp_invariant_recipes.features.score.rank import Forward, Score
from tp_invariant_recipes.observe.placement import class_names
from tp_invariant_recipes.observe.union import gathered_by_first

DITHERED = 2  # repetitions


@dataclass(frozen=True)
class Hidden(Score):
    """What a rank does: rank 0 writes `out`, an .npz with PASS/layers.N and PASS/router.N.

    PASS: 0: the reference; from 1 on with the last bit of every module's output moved. layers.N: [tokens, h] fp32, the
    residual stream after decoder layer N, from 0 on. router.N: [tokens, experts] bool, of its router.
    """

    sequence: str | int | None = None

    def score(self, model: Any, forward: Forward, encode: Any) -> None:
        """As of Score."""
        from tp_invariant_recipes.observe.dithering import Dither

        every = sequences.sequences(self.file, self.config.shape.vocabulary, encode)
        sequence = next(row for row in every if self.sequence is None or row.id == self.sequence)
        batch = Batch((0,), padded(len(sequence.tokens), forward.multiple))
        outputs: dict[str, np.ndarray] = {}
        for number in range(1 + DITHERED):
            dither = Dither([model], number) if number else None
            hooks = LayerOutputs(model, f"{number}/", forward.state.get_tensor_model_parallel_group())
            forward.passes([batch], [sequence])
            hooks.remove()
            if dither:
                dither.unhook()
            outputs |= {name: values[: len(sequence.tokens)] for name, values in hooks.outputs.items()}
        if parts := gathered_by_first(outputs):
            whole = {name: values for part in reversed(parts) for name, values in part.items()}
            np.savez(self.out, **whole)


class LayerOutputs:
    """Hooks that keep the outputs of decoder layers and routers, gathered over the tensor-parallel ranks."""

    def __init__(self, model: nn.Module, prefix: str, group: Any) -> None:
        self.prefix, self.group = prefix, group
        self.outputs: dict[str, np.ndarray] = {}
        self.layer = 0
        self.handles = []
        for module in model.modules():
            names = class_names(module)
            if "TransformerLayer" in names:
                self.handles += [
                    module.register_forward_pre_hook(self._enter),
                    module.register_forward_hook(self._leave),
                ]
            elif "TopKRouter" in names:
                self.handles.append(module.register_forward_hook(self._route))

    def remove(self) -> None:
        """Leave the modules as they were."""
        for handle in self.handles:
            handle.remove()

    def _enter(self, module: Any, args: Any) -> None:
        self.layer = module.layer_number - 1

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self._keep("layers", hidden[:, 0].float(), module.config)

    def _route(self, module: Any, args: Any, output: Any) -> None:
        self._keep("router", output[1].view(-1, output[1].shape[-1]).to(torch.uint8), module.config)

    def _keep(self, kind: str, rows: Tensor, config: Any) -> None:
        """rows: [s/t or s, n]."""
        if config.sequence_parallel and self.group.size() > 1:
            whole = rows.new_empty(len(rows) * self.group.size(), rows.shape[1])
            dist.all_gather_into_tensor(whole, rows.contiguous(), group=self.group)
            rows = whole
        self.outputs[f"{self.prefix}{kind}.{self.layer}"] = rows.cpu().numpy()


def named(file: Path) -> dict[str, np.ndarray]:
    """Read what rank 0 has written."""
    with np.load(file) as stored:
        return dict(stored)
