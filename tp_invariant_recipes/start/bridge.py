"""The first import of Megatron-Bridge happens only here: quietly, and with or without Transformer Engine."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.replacement import Replacement, applied
from tp_invariant_recipes.start import bytecode, lazy_compile, lazy_imports, transformer_engine
from tp_invariant_recipes.start.quiet import quiet
from tp_invariant_recipes.start.start_clock import CLOCK, IMPORTS

BRIDGE = "megatron.bridge.training.pretrain"
# What each rank would otherwise import by itself, after it has been forked.
LATER_IN_RANKS = ("megatron.bridge.training.gpt_step", "megatron.bridge.data.megatron_mimo.base_provider")
MODELS = "megatron.bridge.models.gpt_provider"
# Makes torch.cuda.is_available() ask NVML. Otherwise it starts CUDA, and then no rank can be forked.
ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"

# The environment variables at the first import, and those that its libraries set; empty before.
imported_with: dict[str, str] = {}


def load() -> None:
    """Import Bridge. Its families of models and other packages wait until somebody asks (start/lazy_imports.py).

    The first call takes 5 to 10 s, later ones no time.
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
    bytecode.keep()
    find_spec("megatron.bridge")  # where it is missing, that is said first, not that torch is
    with CLOCK.counted(IMPORTS), quiet(), _without_garbage_collection(), _nvml_only():
        if "transformers" in sys.modules:  # a tokenizer was opened: then Bridge's models do not wait either
            transformer_engine.prepare_import()
        with lazy_imports.put_off(_later), _compiled_later():
            transformer_engine.prepare_import()
            for name in names:
                import_module(name)
        if BRIDGE in names:
            # Autograd imports this at the first backward pass; otherwise each forked rank would import it again.
            import_module("torch.fx.experimental.symbolic_shapes")


def _compiled_later() -> AbstractContextManager[None]:
    """In the block torch.compile waits for the first call. Megatron keeps this version for what it decorates later."""
    if os.environ.get(lazy_imports.EAGER) == "1":
        return nullcontext()
    why = "it would import torch's compiler for functions that most runs never call"
    return applied([Replacement("torch:compile", lazy_compile.at_the_first_call, why)])


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
