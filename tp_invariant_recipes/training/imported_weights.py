# SPDX-License-Identifier: Apache-2.0
"""The weights of a Hugging Face checkpoint in this rank's part of the model, before the first step.

Bridge converts and distributes them when the model has been made and nothing wraps it yet. All parameters are NaN until
then, so one that Bridge passes over is found: it only warns. Where the folder has more bits than the model's weights,
the optimizer's master weights get these bits, too.
"""

from pathlib import Path
from typing import Any

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from torch import Tensor

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.observe.optimizer_state import OptimizerState
from tp_invariant_recipes.sources import weights
from tp_invariant_recipes.sources.weights import WIDER_THAN_BF16, read
from tp_invariant_recipes.text import abbreviated

SHOWN = 5  # parameters that one message names


class ImportedWeights(Callback):
    """Sets weights when the model has been made, and master weights before the first step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._masters: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def load(self, model_chunks: list[Any]) -> list[Any]:
        """Set every parameter of this rank; a pre-wrap hook of Megatron-Bridge. RunError: the folder lacks one."""
        parameters = [parameter for chunk in model_chunks for parameter in chunk.parameters()]
        wider = {tensor.dtype for tensor in read(self.folder).tensors.values()} & WIDER_THAN_BF16
        dtypes = {parameter: parameter.dtype for parameter in parameters}
        for parameter in parameters:
            dtype = torch.float32 if wider and parameter.is_floating_point() else parameter.dtype
            parameter.data = torch.full_like(parameter, torch.nan, dtype=dtype)
        weights.from_folder(self.folder).load_hf_weights(model_chunks)
        self._check(model_chunks)
        for parameter, dtype in dtypes.items():
            if parameter.dtype != dtype:
                self._masters[parameter] = parameter.data
                parameter.data = parameter.data.to(dtype)
        return model_chunks

    def _check(self, model_chunks: list[Any]) -> None:
        wrong = [
            name
            for chunk in model_chunks
            for name, parameter in chunk.named_parameters()
            if not torch.isfinite(parameter).all()
        ]
        if wrong:
            raise RunError(
                f"weights={self.folder}: Megatron-Bridge set no finite values of {abbreviated(wrong, SHOWN)}"
            )

    def on_train_start(self, context: CallbackContext) -> None:
        """Give the master weights the bits that the weights have no room for."""
        with torch.no_grad():
            for slot in OptimizerState(context.optimizer).slots if self._masters else ():
                if slot.master and slot.owner in self._masters:
                    whole = self._masters[slot.owner].reshape(-1)
                    part = whole[slot.start : slot.start + slot.updated.numel()]
                    slot.updated.copy_(part.view_as(slot.updated))
        self._masters.clear()
