# SPDX-License-Identifier: Apache-2.0
"""Free the memory of one training of a process for the next, which `tpi audit` has."""

import gc

import torch

from tp_invariant_recipes.numerics.sums import symmetric_memory, weight_gradient


def settle() -> None:
    """Free the memory of a training for the next: models hold themselves in cycles, and Bridge stops the collector."""
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    weight_gradient.forget_stand_ins()
    symmetric_memory.forget()
    destroy_moe_metrics_tracker()  # it has as many layers as the first model
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

    # Megatron's dispatchers keep the probabilities of the last micro-batch; their autograd graph holds the model where
    # the collector cannot look, so that one with experts would stay beside the next pass's.
    # type(), since isinstance() asks a weak proxy for the class of an object that may be gone.
    for dispatcher in [item for item in gc.get_objects() if issubclass(type(item), MoETokenDispatcher)]:
        vars(dispatcher).pop("probs", None)
    # Megatron keeps the graph of a step, its inputs, its pool of memory and the steps until its capture.
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader

    from tp_invariant_recipes.numerics.megatron.graph_room import forget_graph

    for stage in ("training", "validation"):
        forget_graph(FullCudaGraphWrapper, stage)
        FullCudaGraphWrapper.curr_iteration[stage] = 0
        StaticBufferLoader.static_buffers[stage].clear()
    gc.collect()
    if torch.cuda.is_initialized():  # cuBLAS's workspaces may lie in a graph's pool, which they would keep whole
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
