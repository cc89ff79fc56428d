# SPDX-License-Identifier: Apache-2.0
"""The slots that experts have in a graph of a whole training step: about as many as the steps before it filled.

Any choice of experts fits into ep times the slots of evenly spread tokens, which take as much memory and time whether
they are filled or not. So a layer gets fewer (numerics/layers/experts/token_dispatcher.py). A step whose tokens need
more is void: before the optimizer reads a gradient, it is computed again in a new graph with twice the slots.

While a GPU replays the graph of a step, the host reads the next step's data: between graphs the GPU would wait for it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import full_cuda_graph
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from tp_invariant_recipes.numerics.layers.experts.token_dispatcher import InvariantTokenDispatcher, Room

TRAINING = "training"
BIASES = ("expert_bias", "local_tokens_per_expert")  # of a router, which a step changes


def forget_graph(wrapper: Any, stage: str) -> None:
    """Have Megatron forget a stage's graph and its pool of memory."""
    full_cuda_graph._shared_graph_pool = None
    wrapper.cuda_graph[stage] = wrapper.result[stage] = None


def with_room(original: type) -> type:
    """Return a replacement for the FullCudaGraphWrapper of Bridge's train()."""

    class WithRoom(original):
        rooms: list[Room] | None = None

        def __init__(self, *arguments: Any, **kwargs: Any) -> None:
            super().__init__(*arguments, **kwargs)
            self.ahead: deque[Any] = deque()  # micro-batches of the next step

        def __call__(self, **kwargs: Any) -> Any:
            model = kwargs["model"]
            if self.rooms is None:
                self.lacking = torch.zeros((), dtype=torch.int32, device=next(model[0].parameters()).device)
                self.rooms = []
                for dispatcher in _dispatchers(model):
                    dispatcher.room = Room(self.lacking)
                    self.rooms.append(dispatcher.room)
                buffers = [pair for chunk in model for pair in chunk.named_buffers()] if self.rooms else []
                self.biases = [value for name, value in buffers if name.endswith(BIASES)]
            before = [bias.clone() for bias in self.biases]
            result = super().__call__(**kwargs)
            ahead, self.ahead = _read_ahead(self, **kwargs), deque()
            while self.rooms and self.cuda_graph[TRAINING] is not None:
                dist.all_reduce(self.lacking, dist.ReduceOp.MAX)
                if not self.lacking:  # waits for the step
                    break
                del result
                for bias, value in zip(self.biases, before, strict=True):
                    bias.copy_(value)
                self._prepare(model)
                again = iter(full_cuda_graph.StaticBufferLoader.static_buffers[TRAINING])
                result = super().__call__(**kwargs | {"data_iterator": again})
            self.ahead = ahead
            return result

        def data_read(self, data_iterator: Any, *args: Any, **kwargs: Any) -> Any:
            """As Megatron's, of what was read ahead first."""
            if self.ahead:
                source = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
                data_iterator = iter(partial(self._next, source), None)
            return super().data_read(data_iterator, *args, **kwargs)

        def _next(self, source: Iterator[Any]) -> Any:
            return self.ahead.popleft() if self.ahead else next(source)

        def _prepare(self, model: Sequence[Any]) -> None:
            """Prepare the step's second computation."""
            if dist.get_rank() == 0:
                print("a step needs more slots for experts than its CUDA graph has: it is captured with twice as many")
            for room in self.rooms or ():
                room.most *= 2
            self.lacking.zero_()
            for chunk in model:
                chunk.zero_grad_buffer()
            metrics = get_moe_metrics_tracker()
            metrics.clear()
            vars(metrics).pop("micro_batches", None)  # numerics/sums/step_values.py
            forget_graph(self, TRAINING)
            torch.cuda.empty_cache()
            self.curr_iteration[TRAINING] = self.cuda_graph_warmup_steps

    return WithRoom


def _read_ahead(wrapper: Any, *, data_iterator: Any, num_microbatches: int, **_: Any) -> deque[Any]:
    """Return the next step's micro-batches of a model in one piece; fewer, where the data ends."""
    sources = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    if wrapper.cuda_graph[TRAINING] is not None and len(sources) == 1 and sources[0] is not None:
        with suppress(StopIteration):
            while len(wrapper.ahead) < num_microbatches:
                wrapper.ahead.append(next(sources[0]))
    return wrapper.ahead


def _dispatchers(model: Sequence[Any]) -> Iterator[InvariantTokenDispatcher]:
    """Yield those whose experts other ranks have: where a rank is alone, its tokens fill all slots."""
    for part in (getattr(module, "token_dispatcher", None) for chunk in model for module in chunk.modules()):
        if isinstance(part, InvariantTokenDispatcher) and part.owners.group is not None:
            yield part
