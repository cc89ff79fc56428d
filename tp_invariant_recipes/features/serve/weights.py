# SPDX-License-Identifier: Apache-2.0
"""Other weights in a model that serves: all of them, or those of before."""

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from tp_invariant_recipes.errors import RunError, reason
from tp_invariant_recipes.features.serve.messages import Weights
from tp_invariant_recipes.sources import weights as folders
from tp_invariant_recipes.text import abbreviated


def load(model: Any, weights: Weights) -> str | None:
    """Load weights into the memory of a model, unwrapped. Returns why it has its weights of before; None: it does not.

    Every rank calls it. Until all ranks have read the new weights, these lie beside the others.
    """
    tensors, problem = [*model.parameters(), *model.buffers()], None
    before = [tensor.data for tensor in tensors]
    try:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.data = data.clone()
        _read(model, weights)
    except Exception as error:  # of a file, of memory, of Bridge or of Megatron's checkpoints
        problem = reason(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    problem = next((text for text in problems if text is not None), None)
    for tensor, data in zip(tensors, before, strict=True):
        if problem is None:
            data.copy_(tensor.data)
        tensor.data = data
    return problem


def fits_beside(model: Any) -> bool:
    """Whether the memory of this rank's GPU has room for a second copy of the weights."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return True
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return sum(weight.nbytes for weight in model.parameters()) < unused + torch.cuda.mem_get_info(device)[0]


def _read(model: Any, weights: Weights) -> None:
    from tp_invariant_recipes.training.imported_weights import ImportedWeights
    from tp_invariant_recipes.training.saved_weights import load_weights

    if weights.checkpoint is not None:
        load_weights([model], weights.checkpoint, "")
    else:
        assert weights.folder is not None
        ImportedWeights(weights.folder).load([model])
        if folders.read(weights.folder).digest() != weights.version:
            raise RunError(f"{weights.folder} was written while it was read")
    named = chain(model.named_parameters(), model.named_buffers())
    if wrong := [name for name, tensor in named if tensor.is_floating_point() and not torch.isfinite(tensor).all()]:
        raise RunError(f"not all values are finite of {abbreviated(wrong, 5)}")
