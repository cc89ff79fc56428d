# SPDX-License-Identifier: Apache-2.0
"""The first import of Megatron-Bridge happens only here: quietly, and with or without Transformer Engine.

Bridge's `peft/lora_layers.py` imports Transformer Engine unconditionally, whereas Megatron-Core uses local layers when
the import fails. So on machines without it Megatron-Core comes first, and then a placeholder for Bridge.
"""

import gc
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.replacement import Replacement, applied
from tp_invariant_recipes.start import cache, lazy_imports

VERBOSE = "TPI_VERBOSE"  # environment variable: set to 1 by -v, and inherited by ranks


@contextmanager
def quiet() -> Iterator[None]:
    """Discard this process's standard output and error for a block, also of C++ libraries, unless -v was given.

    So are warnings, which a program may have made errors. An exception of the block passes on unchanged.
    """
    if os.environ.get(VERBOSE) == "1":
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    streams = sys.stdout, sys.stderr
    if "ipykernel" in sys.modules:  # a notebook's streams write to no descriptor
        sys.stdout, sys.stderr = (open(descriptor, "w", closefd=False) for descriptor in (1, 2))  # noqa: SIM115
    with tempfile.TemporaryFile() as sink, warnings.catch_warnings(action="ignore"):
        for descriptor in (1, 2):
            os.dup2(sink.fileno(), descriptor)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout, sys.stderr = streams
            for descriptor, original in zip((1, 2), kept, strict=True):
                os.dup2(original, descriptor)
                os.close(original)


# Every module of Megatron-Core that decides at import whether Transformer Engine is available.
DECIDERS = (
    "megatron.core",
    "megatron.core.transformer.transformer_block",
    "megatron.core.models.gpt",
    "megatron.core.models.hybrid.hybrid_model",
    "megatron.core.optimizer",
    "megatron.core.distributed",
)

PLACEHOLDER_VERSION = "0.0.0"

# Module -> the names that Bridge uses at import.
NAMES = {
    "transformer_engine.pytorch": (
        "Linear", "LayerNormLinear", "RMSNorm", "LayerNorm", "GroupedLinear", "DotProductAttention",
        "TransformerLayer",
    ),
    "transformer_engine.pytorch.ops": ("Sequential", "FusibleOperation", "BasicOperation"),
}  # fmt: skip


def prepare_import() -> None:
    """Make `import megatron.bridge` work here, whether Transformer Engine is installed or not. Idempotent."""
    if "transformer_engine" in sys.modules or find_spec("transformer_engine") is not None:
        return
    for name in DECIDERS:
        import_module(name)
    parent = _module("transformer_engine")
    parent.__dict__["__version__"] = PLACEHOLDER_VERSION
    for name, classes in NAMES.items():
        module = _module(name)
        for cls in classes:
            setattr(module, cls, _missing(cls))
        holder, _, leaf = name.rpartition(".")
        setattr(sys.modules[holder], leaf, module)


def _module(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []
    module.__spec__ = ModuleSpec(name, loader=None, is_package=True)
    sys.modules[name] = module
    return module


def _missing(name: str) -> type:
    import torch

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"transformer_engine.pytorch.{name}: Transformer Engine is not installed (tpi doctor)")

    return type(name, (torch.nn.Module,), {"__init__": refuse})


BRIDGE = "megatron.bridge.training.pretrain"
# What each rank would otherwise import by itself, after it has been forked.
LATER_IN_RANKS = ("megatron.bridge.training.gpt_step", "megatron.bridge.data.megatron_mimo.base_provider")
MODELS = "megatron.bridge.models.gpt_provider"
# Makes torch.cuda.is_available() ask NVML. Otherwise it starts CUDA, and then no rank can be forked.
ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"

COMPILED_LATER = Replacement(
    "torch:compile",
    lazy_imports.at_the_first_call,
    "it would import torch's compiler for functions that most runs never call",
)

# The environment variables at the first import, and those that its libraries set; empty before.
imported_with: dict[str, str] = {}


def load() -> None:
    """Import Bridge. Its families of models and other packages wait until somebody asks (start/lazy_imports.py).

    The first call takes seconds, later ones no time.
    """
    if BRIDGE in sys.modules:
        return
    _import(BRIDGE, *LATER_IN_RANKS)
    imported_with.update(os.environ)


def load_models() -> None:
    """Import what builds and converts models, without the training loop: for a process that trains nothing."""
    if MODELS not in sys.modules:
        _import(MODELS)


def _import(*names: str) -> None:
    cache.keep_bytecode()
    provide_weight_gradients()
    find_spec("megatron.bridge")  # where it is missing, that is said first, not that torch is
    with quiet(), _without_garbage_collection(), _nvml_only():
        if "transformers" in sys.modules:  # a tokenizer was opened: more of it asks for torch's compiler in the import
            prepare_import()
        # Megatron keeps this version of torch.compile for what it decorates later.
        compiled = [COMPILED_LATER] if os.environ.get(lazy_imports.EAGER) != "1" else []
        with lazy_imports.put_off(_later), applied(compiled):
            prepare_import()
            for name in names:
                import_module(name)


@contextmanager
def _later() -> Iterator[None]:
    """Hold while a package is imported that `load` has put off."""
    with quiet(), _nvml_only():
        yield


@contextmanager
def _nvml_only() -> Iterator[None]:
    """In the block, torch learns the number of GPUs and their capability without starting CUDA.

    Of all that Bridge imports, seven modules ask whether there is a GPU, and modelopt asks for its capability.
    """
    before = os.environ.get(ASK_NVML)
    os.environ[ASK_NVML] = "1"
    try:
        with applied([Replacement("torch.cuda:get_device_capability", _capability, "it would start CUDA")]):
            yield
    finally:
        del os.environ[ASK_NVML]
        if before is not None:
            os.environ[ASK_NVML] = before


def _capability(original: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
    def ask(device: Any = None) -> tuple[int, int]:
        visible = gpus.visible()
        return visible[0].capability if device in (None, 0) and visible else original(device)

    return ask


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection in the block, and exclude the block's objects from later collections.

    Megatron collects garbage when training starts. In a forked rank that would visit all of Bridge's objects and so
    copy their memory.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collected:
            gc.enable()


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
DEFAULT = ":4096:8"  # torch's own choice on Hopper and Blackwell: 32 MiB


def deterministic_mode_without_its_extras() -> None:
    """Reduce host time without changing bits. Call it after setting up the CUDA device and the environment.

    Deterministic mode fills every new tensor with NaN; no code here reads unwritten memory. Also, torch
    parses CUBLAS_WORKSPACE_CONFIG with a regular expression at every product, in 30 µs, although cuBLAS already has its
    workspace. If the value is torch's default for the device, this function removes it from the environment after the
    only check for it has passed (aten/src/ATen/cuda/CublasHandlePool.cpp).
    """
    import torch

    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if os.environ.get(WORKSPACE) == DEFAULT and torch.cuda.get_device_capability()[0] >= 9:
        torch.mm(torch.zeros(16, 16, device="cuda"), torch.zeros(16, 16, device="cuda"))
        del os.environ[WORKSPACE]


APEX = "fused_weight_gradient_mlp_cuda"  # Apex's extension, which is on no registry


def provide_weight_gradients() -> None:
    """Make Apex's extension importable where it is not installed. Idempotent.

    Megatron-Core calls it for layers that are not Transformer Engine's, such as the output layer, where a model has
    `gradient_accumulation_fusion`. Transformer Engine's GEMM does the same: it adds to an fp32 gradient.
    """
    if APEX not in sys.modules and find_spec(APEX) is None:
        sys.modules[APEX] = module = ModuleType(APEX)
        vars(module).update(wgrad_gemm_accum_fp32=_accumulate, wgrad_gemm_accum_fp16=_accumulate)


def _accumulate(x: Any, dy: Any, main_grad: Any) -> None:
    """Add a weight's gradient in place. x: [tokens, in], dy: [tokens, out], in bf16. main_grad: [out, in], fp32."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    general_gemm(x, dy, out_dtype=main_grad.dtype, layout="NT", out=main_grad, accumulate=True, grad=True)
