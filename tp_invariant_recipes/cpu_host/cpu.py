# SPDX-License-Identifier: Apache-2.0
"""The CPU host: for a `with` block, the CPU serves the calls that Megatron makes to CUDA.

Three parts: a function mode that sends "cuda" tensors to the CPU, a table of replaced attributes, and a
placeholder for Transformer Engine where it is not installed (`transformer_engine.py`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tp_invariant_recipes.cpu_host.stand_ins import fsdp, layers, mamba, torch_adam
from tp_invariant_recipes.machine.versions import installed as installed_version
from tp_invariant_recipes.replacement import Replacement, applied, instead
from tp_invariant_recipes.start import bridge, lazy_imports

CPU = torch.device("cpu")


class CudaMeansCpu(TorchFunctionMode):
    """Makes every tensor for a CUDA device on the CPU instead."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Rewrite the device of `func`'s arguments, then call it."""
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
        if "pin_memory" in kwargs:
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        rewrite = _REWRITES.get(getattr(func, "__name__", ""))
        return func(*args, **kwargs) if rewrite is None else rewrite(func, args, kwargs)


def _keep_tensor(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    return args[0]


def _move(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    return func(args[0], *(_on_cpu(a) if isinstance(a, str | torch.device) else a for a in args[1:]), **kwargs)


def _type_name(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    # Megatron's optimizers accept only parameters whose type() is torch.cuda.…Tensor.
    named = func(*args, **kwargs)
    return named.replace("torch.", "torch.cuda.", 1) if isinstance(named, str) else named


_REWRITES: dict[str, Callable] = {"cuda": _keep_tensor, "pin_memory": _keep_tensor, "to": _move, "type": _type_name}


def _on_cpu(device: Any) -> Any:
    """Get the CPU for a CUDA device in any of torch's spellings (int, "cuda:1", torch.device), otherwise `device`."""
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int) or str(device).startswith("cuda"):
        return CPU
    return device


class _Inert:
    """Replaces a CUDA stream or event: every method does nothing and returns another such object."""

    priority_range = staticmethod(lambda: (0, 0))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., "_Inert"]:
        return lambda *args, **kwargs: _Inert()

    def __enter__(self) -> "_Inert":
        return self

    def __exit__(self, *exc: object) -> None:
        pass


def _always(value: Any) -> Callable[[Any], Callable]:
    return lambda original: lambda *args, **kwargs: value


def _instead(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _within_modes(original: Callable) -> Callable:
    @wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        with CudaMeansCpu():
            return original(*args, **kwargs)

    return called


def _splits_as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Turn the all-to-all's split sizes into arrays; Megatron does so only when it copies them from a GPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _discarding(original: Callable) -> Callable:
    """Empty outputs that are computed again. What NumPy has read cannot be resized, and gets bytes of NaN."""

    @wraps(original)
    def discard(self: Any, hook_tensor: torch.Tensor) -> None:
        outputs = self.outputs
        self.outputs = tuple(output for output in outputs if output.untyped_storage().resizable())
        for output in outputs:
            if not output.untyped_storage().resizable():
                output.untyped_storage().fill_(0xFF)
        original(self, hook_tensor)
        self.outputs = outputs

    return discard


def _fill_storage(emptied: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Give the storage of an emptied tensor, whatever views it has, the bytes of another one of its size."""
    values, storage = recomputed.untyped_storage(), emptied.untyped_storage()
    if storage.resizable():
        storage.resize_(values.nbytes())
    storage.copy_(values)


def _from(path: str) -> Callable[[Any], Any]:
    """Return what MODULE:NAME names, looked up when it is installed."""
    return lambda original: resolve_name(path)


def _cuda(name: str, make: Callable[[Any], Any], why: str) -> Replacement:
    return Replacement(f"torch.cuda:{name}", make, why)


_NO_DEVICE = "there is no CUDA driver to ask"
_NO_STREAM = "the CPU runs in program order: streams, events and synchronisation have nothing to do"
_RNG = "Megatron's RNG tracker forks the CUDA generator; here it forks the CPU's"
_BACKWARD = "torch runs a backward pass outside of the modes of its caller, and a recomputed layer may make masks there"
_LOCAL_NORM = "megatron.core.transformer.torch_norm:WrappedTorchNorm"
_NO_TE = "the fused CUDA kernels of Transformer Engine or Apex may be installed but cannot run"

TORCH = (
    Replacement("torch:compile", lazy_imports.at_the_first_call, "the functions of this block are called as they are"),
    _cuda("current_device", _always(CPU), _NO_DEVICE),
    _cuda("is_available", _always(False), _NO_DEVICE),
    _cuda("device_count", _always(1), "Bridge seeds the RNG tracker only where it counts a device"),
    _cuda("set_device", _always(None), _NO_DEVICE),
    _cuda("get_device_capability", _always((0, 0)), _NO_DEVICE),
    _cuda("get_device_properties",
        _always(SimpleNamespace(name="cpu", major=0, minor=0, multi_processor_count=1, total_memory=0)), _NO_DEVICE),
    _cuda("synchronize", _always(None), _NO_STREAM),
    _cuda("empty_cache", _always(None), _NO_STREAM),
    _cuda("Stream", _instead(_Inert), _NO_STREAM),
    _cuda("Event", _instead(_Inert), _NO_STREAM),
    _cuda("stream", _always(nullcontext()), _NO_STREAM),
    _cuda("set_stream", _always(None), _NO_STREAM),
    _cuda("current_stream", _always(_Inert()), _NO_STREAM),
    _cuda("default_stream", _always(_Inert()), _NO_STREAM),
    _cuda("memory_stats", _always(defaultdict(int)), _NO_DEVICE),
    _cuda("memory_allocated", _always(0), _NO_DEVICE),
    _cuda("max_memory_allocated", _always(0), _NO_DEVICE),
    _cuda("memory_reserved", _always(0), _NO_DEVICE),
    _cuda("max_memory_reserved", _always(0), _NO_DEVICE),
    _cuda("reset_peak_memory_stats", _always(None), _NO_DEVICE),
    _cuda("manual_seed", _instead(torch.default_generator.manual_seed), _RNG),
    _cuda("get_rng_state", _instead(_get_rng_state), _RNG),
    _cuda("set_rng_state", _instead(_set_rng_state), _RNG),
    Replacement("torch.cuda.random:get_rng_state", _instead(_get_rng_state), _RNG),
    Replacement("torch:Tensor.record_stream", _instead(lambda *_: None), _NO_STREAM),
    Replacement("torch.nn:Module.cuda", lambda original: lambda self, *a, **k: self, _NO_DEVICE),
)  # fmt: skip

MEGATRON = (
    Replacement("megatron.core.tensor_parallel.random:_set_cuda_rng_state", _instead(_set_rng_state), _RNG),
    Replacement("megatron.core.tensor_parallel.random:CheckpointFunction.backward",
        lambda original: staticmethod(_within_modes(original)), _BACKWARD),
    Replacement("megatron.core.tensor_parallel.random:CheckpointWithoutOutput._recompute", _within_modes, _BACKWARD),
    Replacement(
        "megatron.core.tensor_parallel.random:_get_share_storage",
        _always(_fill_storage),
        "Megatron saves a copy by a C++ extension, which a CPU would compile for a minute in the first backward pass",
    ),
    Replacement(
        "megatron.core.tensor_parallel.random:CheckpointWithoutOutput.discard_output_and_register_recompute",
        _discarding,
        "kernels of numba and digests read tensors as NumPy arrays, whose memory torch cannot resize",
    ),
    *layers.NORM,
    Replacement("megatron.core.transformer.transformer_block:LayerNormImpl", _from(_LOCAL_NORM),
        "the final norm is otherwise Apex's or Transformer Engine's"),
    Replacement("megatron.core.models.hybrid.hybrid_block:TENorm", _from(_LOCAL_NORM),
        "the final norm is otherwise Transformer Engine's"),
    instead("megatron.core.transformer.moe.moe_layer:TELinear",
        "cpu_host.stand_ins.layers:DuplicatedLinear",
        "projections between hidden size and experts' latents are otherwise Transformer Engine's"),
    Replacement("megatron.core.transformer.moe.moe_layer:HAVE_TE", _always(True), "so are they where they are local"),
    Replacement("megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__",
        lambda original: lambda self, fp8=None: original(self, fp8=None),
        "norms that are computed again ask Transformer Engine whether they are in FP8"),
    *layers.CONTEXT_ATTENTION,
    *mamba.REPLACEMENTS,
    *layers.DELTA_NET,
    Replacement("megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu", _instead(_splits_as_numpy),
        "Gloo's all-to-all takes split sizes as numbers, and here they are on the CPU from the start"),
    Replacement("megatron.core.optimizer:Adam", _instead(torch.optim.AdamW), _NO_TE),
    Replacement("megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer.allgather_params",
        _from("megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer.broadcast_params"),
        "ranks own matrices of unlike sizes, and Gloo gathers equal ones only"),
    *torch_adam.REPLACEMENTS,
    *fsdp.REPLACEMENTS,
    *(
        Replacement(f"megatron.{module}:{name}", _from(f"megatron.core.utils:{twin}"), _NO_TE)
        for module, name, twin in (
            ("core.optimizer.clip_grads", "multi_tensor_applier", "local_multi_tensor_applier"),
            ("core.optimizer.clip_grads", "l2_norm_impl", "local_multi_tensor_l2_norm"),
            ("core.optimizer.clip_grads", "multi_tensor_scale_impl", "local_multi_tensor_scale"),
            ("core.optimizer.clip_grads", "multi_tensor_scale_tensor_impl", "local_multi_tensor_scale"),
            ("core.optimizer.optimizer", "multi_tensor_applier", "local_multi_tensor_applier"),
            ("core.optimizer.optimizer", "multi_tensor_scale_impl", "local_multi_tensor_scale"),
        )
    ),
)  # fmt: skip

BRIDGE = (
    *(
        Replacement(f"megatron.bridge.training.utils.train_utils:{name}", _from(f"megatron.core.utils:{twin}"), _NO_TE)
        for name, twin in (
            ("multi_tensor_applier", "local_multi_tensor_applier"),
            ("multi_tensor_l2norm", "local_multi_tensor_l2_norm"),
        )
    ),
    Replacement("megatron.bridge.training.setup:initialize_megatron",
        lambda original: partial(original, allow_no_cuda=True),
        "Bridge asserts CUDA unless told that none is needed"),
    Replacement("megatron.bridge.peft.utils:HAVE_TE",
        lambda original: original and installed_version("transformer-engine") is not None,
        "it is true of placeholders, which are no classes that a layer could be compared with"),
    Replacement("megatron.bridge.training.setup:set_jit_fusion_options", _always(None),
        "it only warms up fused CUDA kernels, by compiling them for a CPU that will not use them"),
)  # fmt: skip


@contextmanager
def installed() -> Iterator[None]:
    """Run the block's Megatron code on the CPU, with one thread per process: threads would split sums."""
    bridge.load()
    with _serving((*TORCH, *MEGATRON, *BRIDGE)):
        yield


depth: list[bool] = []  # as many as there are blocks now in which the CPU serves


@contextmanager
def megatron_core() -> Iterator[None]:
    """Run a program of Megatron-Core alone, without Bridge, on the CPU."""
    with _serving((*TORCH, *MEGATRON)):
        yield


@contextmanager
def _serving(replacements: Sequence[Replacement]) -> Iterator[None]:
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        depth.append(True)
        stack.callback(depth.pop)
        # OMP_NUM_THREADS has the same effect, but only if torch is imported afterwards.
        torch.set_num_threads(1)
        stack.callback(torch.set_num_threads, threads)
        # Each rank would compile Megatron's compiled functions again, which takes longer than a short run.
        lazy_imports.plain.append(True)
        stack.callback(lazy_imports.plain.pop)
        if not lazy_imports.waits("torch._dynamo"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(applied(replacements))
        stack.enter_context(CudaMeansCpu())
        yield
