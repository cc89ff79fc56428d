"""What one training leaves in a process that the next one could read: put back, or named so that the process ends.

    state = ProcessState()      before the first training, with Bridge loaded
    …                           a training
    state.restore()             [] if the next training finds what the first one found, otherwise what differs

Flags, variables and generators are put back. Globals of Megatron and of this package are compared: a module's
attributes, those of its classes and its objects, and the items of its lists and dictionaries. Modules that the training
itself has imported have no state to compare with.
"""

import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tp_invariant_recipes.numerics.sums import weight_gradient

PACKAGES = ("megatron.core", "megatron.bridge", "megatron.training", "tp_invariant_recipes")
PLAIN = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))
_ABSENT = object()


@dataclass(frozen=True)
class Flag:
    """A state of the process that can be put back."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]


def _put_environment(before: dict[str, str]) -> None:
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def _attribute(path: str) -> Flag:
    *parents, name = path.split(".")

    def holder() -> Any:
        found: Any = torch
        for parent in parents:
            found = getattr(found, parent)
        return found

    return Flag(f"torch.{path}", lambda: getattr(holder(), name), lambda value: setattr(holder(), name, value))


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


FLAGS = (
    Flag("environment variables", lambda: dict(os.environ), _put_environment),
    Flag("signals", _handlers, lambda before: [signal.signal(number, one) for number, one in before.items()]),
    Flag("random", random.getstate, random.setstate),
    Flag("numpy.random", np.random.get_state, np.random.set_state),
    Flag("torch's generator", torch.get_rng_state, torch.set_rng_state),
    Flag("torch.get_default_dtype", torch.get_default_dtype, torch.set_default_dtype),
    Flag("torch.get_num_threads", torch.get_num_threads, torch.set_num_threads),
    Flag("torch.is_grad_enabled", torch.is_grad_enabled, torch.set_grad_enabled),
    Flag(
        "torch.use_deterministic_algorithms",
        _deterministic,
        lambda before: torch.use_deterministic_algorithms(before[0], warn_only=before[1]),
    ),
    _attribute("utils.deterministic.fill_uninitialized_memory"),
    _attribute("backends.cudnn.enabled"),
    _attribute("backends.cudnn.benchmark"),
    _attribute("backends.cudnn.deterministic"),
    _attribute("backends.cudnn.allow_tf32"),
    _attribute("backends.cuda.matmul.allow_tf32"),
    _attribute("backends.cuda.matmul.allow_fp16_reduced_precision_reduction"),
    _attribute("backends.cuda.matmul.allow_bf16_reduced_precision_reduction"),
)

# Globals of Megatron's that a training leaves changed. They are put back, and compared like all others.
_LEFT = (
    ("megatron.core.full_cuda_graph", ("FullCudaGraphWrapper.cuda_graph",)),
    (
        "megatron.core.parallel_state",  # what destroy_model_parallel() forgets
        (
            "_CONTEXT_PARALLEL_GLOBAL_RANKS",
            "_DATA_PARALLEL_GLOBAL_RANKS",
            "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP",
            "_EMBEDDING_GLOBAL_RANKS",
            "_EXPERT_MODEL_PARALLEL_RANKS",
            "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
            "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
            "_MODEL_PARALLEL_GLOBAL_RANKS",
            "_PIPELINE_GLOBAL_RANKS",
            "_POSITION_EMBEDDING_GLOBAL_RANKS",
            "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS",
        ),
    ),
    # Decisions by comparing bits, for every kind of operands; a cold start makes them anew.
    ("tp_invariant_recipes.numerics.layers.attention", ("_together_is_right",)),
    ("tp_invariant_recipes.numerics.products.contraction", ("_restarting_is_right",)),
    ("tp_invariant_recipes.numerics.products.cpu", ("_together_is_right",)),
    ("tp_invariant_recipes.numerics.products.defined", ("_cublas_is_right",)),
    # Room and streams that are made where there are none.
    ("tp_invariant_recipes.numerics.sums.weight_gradient", ("_stand_ins",)),
    ("tp_invariant_recipes.numerics.megatron.data_parallel", ("_streams",)),
    ("tp_invariant_recipes.numerics.sums.data_shards", ("_streams",)),
    ("megatron.core.tensor_parallel.random", ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED")),
)
PUT_BACK = frozenset(f"{module}:{name}" for module, names in _LEFT for name in names)
# May differ: the one object that measures times.
EXEMPT = frozenset(("megatron.core.utils:StragglerDetector._instance", "megatron.training.training:stimer"))


def settle() -> None:
    """Free the memory of a training for the next: models hold themselves in cycles, and Bridge stops the collector."""
    weight_gradient.forget_stand_ins()
    _forget_probabilities()
    _forget_graphs()
    gc.collect()
    if torch.cuda.is_initialized():  # cuBLAS's workspaces may lie in a graph's pool, which they would keep whole
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _forget_graphs() -> None:
    """Megatron keeps the graph of a step, its inputs, its pool of memory and the steps until its capture."""
    from megatron.core import full_cuda_graph
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader

    full_cuda_graph._shared_graph_pool = None

    for stage in ("training", "validation"):
        FullCudaGraphWrapper.cuda_graph[stage] = FullCudaGraphWrapper.result[stage] = None
        FullCudaGraphWrapper.curr_iteration[stage] = 0
        StaticBufferLoader.static_buffers[stage].clear()  # the list stays: another one would differ, and end warm ranks


def _forget_probabilities() -> None:
    """Megatron's dispatchers keep those of the last micro-batch; their autograd graph holds the model where the
    collector cannot look, so that one with experts would stay beside the next pass's."""
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

    for one in [one for one in gc.get_objects() if isinstance(one, MoETokenDispatcher)]:
        vars(one).pop("probs", None)


class ProcessState:
    """The state of this process as it is now."""

    def __init__(self) -> None:
        for module, _ in _LEFT:
            import_module(module)
        self._flags = [flag.get() for flag in FLAGS]
        self._globals = {name: _copy(value) for name, value in _globals()}
        self._modules = {name for name in sys.modules if name.startswith(PACKAGES)}

    def restore(self) -> list[str]:
        """Put back what can be. Returns the names of the globals that differ still."""
        for flag, before in zip(FLAGS, self._flags, strict=True):
            flag.put(before)
        for name in PUT_BACK & self._globals.keys():
            _put_back(name, self._globals[name])
        found = {name: value for name, value in _globals() if name.partition(":")[0] in self._modules}
        return [
            name
            for name in sorted({*found, *self._globals} - EXEMPT)
            if not _same(self._globals.get(name, _Copy(_ABSENT)), _copy(found.get(name, _ABSENT)))
        ]


@dataclass(frozen=True)
class _Copy:
    """A value and, of a container or an object of ours or of Megatron's, what it held."""

    value: Any
    held: tuple[Any, ...] = ()


def _globals() -> Iterator[tuple[str, Any]]:
    """("module:attribute", value) of every global; of classes their attributes too."""
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith(PACKAGES) or not issubclass(type(module), ModuleType):
            continue
        for name, value in list(vars(module).items()):
            # By type(): isinstance() asks an object for its class, and objects that stand for a module import it then.
            kind = type(value)
            if name.startswith("__") or issubclass(kind, ModuleType):
                continue
            yield f"{module_name}:{name}", value
            if issubclass(kind, type) and value.__module__ == module_name:
                for inner, its in list(vars(value).items()):
                    if not inner.startswith("__") and not inner.startswith("_abc_"):
                        yield f"{module_name}:{name}.{inner}", its


def _put_back(name: str, before: "_Copy") -> None:
    module, _, path = name.partition(":")
    *parents, attribute = path.split(".")
    holder: Any = sys.modules[module]
    for parent in parents:
        holder = getattr(holder, parent)
    setattr(holder, attribute, before.value)
    if isinstance(before.value, dict):
        before.value.clear()
        before.value.update(zip(before.held[0::2], before.held[1::2], strict=True))


def _copy(value: Any) -> _Copy:
    kind = type(value)
    if issubclass(kind, dict):
        # dict's own items: transformers' table of configurations imports hundreds of modules when asked for its items.
        return _Copy(value, tuple(part for pair in list(dict.items(value)) for part in pair))
    if issubclass(kind, list | set):
        return _Copy(value, tuple(value))
    if kind.__module__.startswith(PACKAGES) and not issubclass(kind, type) and hasattr(value, "__dict__"):
        return _Copy(value, tuple(part for pair in list(vars(value).items()) for part in pair))
    return _Copy(value)


def _same(a: _Copy, b: _Copy) -> bool:
    if not _equal(a.value, b.value) or len(a.held) != len(b.held):
        return False
    return all(_equal(x, y) for x, y in zip(a.held, b.held, strict=True))


def _equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and issubclass(type(a), PLAIN) and bool(a == b))
