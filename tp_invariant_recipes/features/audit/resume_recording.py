# SPDX-License-Identifier: Apache-2.0
"""The callback that writes down a training's state before a step, and what later steps read and route (resume.py)."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from tp_invariant_recipes.observe.module_hooks import named_modules
from tp_invariant_recipes.observe.optimizer_state import STEP, OptimizerState
from tp_invariant_recipes.observe.shards import gather_weights, unwrapped
from tp_invariant_recipes.runs.sweep_dir import AuditedRun, RankRecord, State
from tp_invariant_recipes.settings.cuda_graphs import FULL

_LONGEST = 24  # characters of a value that a verdict shows


class ResumeRecording:
    """Records the state before step `first`, and what that step and later ones read and route. For every rank."""

    def __init__(self, run: AuditedRun, first: int) -> None:
        self.run, self.first = run, first
        self.state: dict[str, State] = {}
        self.steps: dict[int, dict[str, str]] = {}
        self._handles: list[Any] = []
        self._begun = False

    def on_train_step_start(self, context: Any) -> None:
        """Take the state, before anything of the step has been read or computed."""
        step = context.state.train_state.step + 1
        if step == self.first:
            if self._begun:  # what is loaded is whole
                gather_weights(context.model)
            self.state = {name: described(value) for name, value in states(context)}
        if step >= self.first:
            self._hook(context.model, self.steps.setdefault(step, {}))

    def on_train_step_end(self, context: Any) -> None:
        """Write what there is: a training that fails later has recorded this step."""
        self._begun = True
        self.close()
        if self.steps:
            record = RankRecord(self.state, {str(n): seen for n, seen in self.steps.items()})
            self.run.write(self.run.state(dist.get_rank()), record.as_json())

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, model: Any, seen: dict[str, str]) -> None:
        """Have the step's batches, and the tokens of each expert, in `seen`. A graph's capture must not be read."""
        from megatron.core.transformer.moe.router import Router

        graphs = unwrapped(model[0]).config.cuda_graph_impl
        hashes: dict[str, Any] = {}

        def add(name: str, *tensors: Tensor) -> None:
            digest = hashes.setdefault(name, xxhash.xxh3_128())
            for tensor in tensors:
                digest.update(_bytes(tensor))
            seen[name] = digest.hexdigest()

        def read(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            add("batch", *(value for value in (*arguments, *named.values()) if isinstance(value, Tensor)))

        for chunk in map(unwrapped, model) if graphs != FULL else ():
            self._handles.append(chunk.register_forward_pre_hook(read, with_kwargs=True))
            for name, module in named_modules(chunk, every=True) if graphs in (None, "none") else ():
                if isinstance(module, Router):
                    routed = _routed(f"tokens per expert of {name}", add)
                    self._handles.append(module.register_forward_hook(routed))


def _routed(name: str, add: Any) -> Any:
    def routed(module: Any, inputs: Any, outputs: Any) -> None:
        maps = [o for o in outputs if isinstance(o, Tensor) and o.dtype == torch.bool]
        add(name, *(routing_map.sum(0) for routing_map in maps))

    return routed


def states(context: Any) -> Iterator[tuple[str, Any]]:
    """Yield KIND/NAME and the value of every state that the coming steps read, in the order of resume_result.KINDS.

    context: Bridge's, of `on_train_step_start`. A tensor is this rank's part.
    """
    chunks = [unwrapped(chunk) for chunk in context.model]
    modules = [(name, module) for chunk in chunks for name, module in named_modules(chunk, every=True)]
    names = {}
    for name, module in modules:
        for own, parameter in module.named_parameters(recurse=False):
            names[id(parameter)] = f"{name}.{own}".removeprefix(".")
            yield f"weights/{names[id(parameter)]}", parameter
    slots = OptimizerState(context.optimizer).slots
    yield from ((f"masters/{names[id(slot.owner)]}", slot.updated) for slot in slots if slot.master)
    for slot in slots:
        owner = names[id(slot.owner)]
        moments = slot.wrapped.state.get(slot.updated, {})
        yield from ((f"moments/{key} of {owner}", value) for key, value in moments.items() if key != STEP)
        if slot.step is not None:
            yield f"moments/step count of {owner}", int(slot.step)
    yield from ((f"scheduler/{key}", value) for key, value in context.scheduler.state_dict().items())
    for n, group in enumerate(context.optimizer.param_groups):
        yield from ((f"scheduler/{key} of group {n}", group.get(key)) for key in ("lr", "weight_decay"))
    yield from _loss_scale(context.optimizer)
    yield from _random_states()
    yield from _place_in_data(context.state.train_state)
    for name, module in modules:
        for part, meta in (getattr(module, "fp8_meta", None) or {}).items():
            kinds = ("scale", "scale_inv", "amax_history")
            held = ((kind, getattr(meta, kind, None)) for kind in kinds)
            yield from ((f"fp8/{kind} of {name} ({part})", value) for kind, value in held if value is not None)
    buffers = [(name, module, own) for name, module in modules for own in module.named_buffers(recurse=False)]
    routers = {name for name, module in modules if "Router" in type(module).__name__}
    for kind, chosen in (("router", True), ("buffers", False)):
        for name, _, (own, value) in buffers:
            if (name in routers) == chosen:
                yield f"{kind}/{own} of {name}", value
    yield "graphs/captured", _captured(modules)


def _loss_scale(optimizer: Any) -> Iterator[tuple[str, Any]]:
    yield "loss_scale/loss scale", optimizer.get_loss_scale()
    for n, part in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        scaler = getattr(part, "grad_scaler", None)
        held = scaler.state_dict() if scaler is not None else {}
        yield from ((f"loss_scale/{key} of optimizer {n}", value) for key, value in held.items())


def _random_states() -> Iterator[tuple[str, Any]]:
    from megatron.core import tensor_parallel

    yield "rng/torch", torch.get_rng_state()
    if torch.cuda.is_available():
        yield "rng/CUDA", torch.cuda.get_rng_state()
    for name, value in tensor_parallel.get_cuda_rng_tracker().get_states().items():
        yield f"rng/Megatron's tracker, {name}", value.get_state() if hasattr(value, "get_state") else value
    numbers: Any = np.random.get_state()  # its text would leave some out
    yield "rng/numpy", (numbers[1].tobytes(), *numbers[2:])
    yield "rng/python", random.getstate()


def _place_in_data(train_state: Any) -> Iterator[tuple[str, Any]]:
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size, get_num_microbatches

    places = {name: value for name, value in vars(train_state).items() if isinstance(value, int | float)}
    places |= {"micro-batches": get_num_microbatches(), "global batch": get_current_global_batch_size()}
    yield from ((f"data/{name}", value) for name, value in places.items())


def _captured(modules: list[tuple[str, Any]]) -> int:
    """Return how many graphs there are: of modules, and of the whole step."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    whole = sum(graph is not None for graph in FullCudaGraphWrapper.cuda_graph.values())
    return whole + sum(len(getattr(module, "cuda_graphs", None) or ()) for _, module in modules)


def described(value: Any) -> State:
    """Return the digest of a value, and what a verdict shows of it."""
    if isinstance(value, Tensor):
        digest = xxhash.xxh3_128_hexdigest(_bytes(value))
        if value.numel() == 1:
            return State(digest, f"{value.item():.9g}")
        zero = type(value) in (Tensor, torch.nn.Parameter) and not value.any()
        return State(digest, "0" if zero else "")
    text = repr(value)
    return State(xxhash.xxh3_128_hexdigest(text.encode()), text if len(text) <= _LONGEST else "")


def _bytes(tensor: Tensor) -> bytes:
    """Return a tensor's bytes; of a quantized one those of its values, since it may hold its transpose, too."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if type(tensor).__module__.startswith("transformer_engine"):
        tensor = tensor.dequantize()
    return tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
