# SPDX-License-Identifier: Apache-2.0
"""Patch mode, for programs that do not use our recipes: `tpi.invariant`, or an environment variable and this import.

    with tpi.invariant(virtual_shards=8): ...       # builds and trains a model; tpi.invariant.enable() for good
    NVTE_TP_INVARIANT_MODE=1 TPI_SHARDS=8 torchrun … pretrain_gpt.py …   # which imports this before it builds the model

TPI_NUMERICS=portable gives the bits of any machine instead of numerics=tree, and what tpi.Engine decodes.
From then on, in this process, every GPTModel of Megatron-Core is built of invariant layers and starts from weights that
no layout changes. Linear and LayerNormLinear of Transformer Engine that a program builds itself are invariant, too,
from the weights that it gives them. What is not covered is refused when it is built. With the variable unset or "0"
nothing happens, and neither torch nor Megatron is imported.
"""

import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, fields
from functools import wraps
from inspect import signature
from typing import Any
from unittest import mock

from tp_invariant_recipes.check.invariant import invariance
from tp_invariant_recipes.check.rule import broken_rules
from tp_invariant_recipes.cpu_host.vectors import VECTORS
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.fields import catalogue, model
from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.machine.versions import installed
from tp_invariant_recipes.numerics.settings import NumericsSettings
from tp_invariant_recipes.replacement import Replacement, apply
from tp_invariant_recipes.settings import environment
from tp_invariant_recipes.settings.run_config import RunConfig

SWITCH, SHARDS, NUMERICS = "NVTE_TP_INVARIANT_MODE", "TPI_SHARDS", "TPI_NUMERICS"
MODES = ("tree", "portable")
POSITIONS = ("rope", "none")
REDUCED = "allow_bf16_reduced_precision_reduction"  # flag of torch
ROTARY = ("rotary_base", "rope_scaling", "rope_scaling_factor")  # arguments of GPTModel


def switched_on(variables: dict[str, str]) -> NumericsSettings | None:
    """Return the numerics if the patch mode is on, None if it is off. Raises ConfigError for what is neither."""
    value, shards, mode = variables.get(SWITCH, "0"), variables.get(SHARDS, "8"), variables.get(NUMERICS, MODES[0])
    if value not in ("0", "1"):
        raise ConfigError(f"{SWITCH}={value}: 1 makes Megatron-Core invariant, 0 leaves it alone")
    if value == "0":
        return None
    if not shards.isdecimal() or int(shards).bit_count() != 1:
        raise ConfigError(f"{SHARDS}={shards}: must be a power of two")
    if mode not in MODES:
        raise ConfigError(f"{NUMERICS}={mode}: must be {' or '.join(MODES)}")
    return NumericsSettings(mode, int(shards))


def install(numerics: NumericsSettings) -> Callable[[], None]:
    """Make this process's Megatron-Core invariant. Returns what takes it back."""
    import torch
    from megatron.core.transformer import TransformerConfig

    from tp_invariant_recipes.numerics.megatron import replacements, te_modules

    shards = numerics.virtual_shards
    assert shards is not None, "the patch mode has a V"
    variables = _variables()  # before anything is changed
    with ExitStack() as undo:
        # What the layers read. A recipe sets both on its own configuration; a plain one has these.
        for name, value in (("virtual_shards", shards), ("invariant_mode", numerics.mode)):
            setattr(TransformerConfig, name, value)
            undo.callback(delattr, TransformerConfig, name)
        undo.enter_context(mock.patch.dict(os.environ, variables))
        matmul = torch.backends.cuda.matmul
        undo.callback(setattr, matmul, REDUCED, getattr(matmul, REDUCED))
        setattr(matmul, REDUCED, False)
        modules = te_modules.replacements(shards, _refuse) if installed("transformer-engine") is not None else ()
        of_core = (
            row
            for row in replacements.replacements(numerics)
            if not row.target.startswith("megatron.bridge.")  # a program without Bridge need not have it
        )
        # They come last: what Megatron-Core imports by name must be its own when it is imported here.
        undo.callback(apply((*_rows(numerics), *modules, *of_core)))
        if os.environ.get("RANK", "0") == "0":
            words = f"numerics={numerics.mode}, {SHARDS}={shards}"
            print(f"tp_invariant_recipes: {SWITCH}=1: {words}", file=sys.stderr, flush=True)
        return undo.pop_all().close


def _rows(numerics: NumericsSettings) -> tuple[Replacement, ...]:
    return (
        Replacement(
            "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
            lambda original: _checked_and_initialised(original, numerics),
            "Megatron draws other weights for every layout",
        ),
        Replacement(
            "megatron.core.models.common.language_module.language_module:LanguageModule.__init__",
            _only_subclasses_of("megatron.core.models.gpt:GPTModel", "has no invariant version; only GPTModel has"),
            "other models have layers with no invariant version",
        ),
        Replacement(
            "megatron.core.transformer.transformer_block:_get_block_submodules",
            lambda original: _invariant_layers(original, numerics),
            "every layer specification passes here, wherever a program has it from",
        ),
        Replacement(
            "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
            lambda original: _checked_ddp(original, numerics),
            "some ways to reduce gradients are not covered",
        ),
        Replacement(
            "megatron.core.distributed.data_parallel_base:_BaseDataParallel.__init__",
            _only_subclasses_of(
                "megatron.core.distributed:DistributedDataParallel",
                "reduces gradients in an order of its own; use DistributedDataParallel",
            ),
            "FSDP reduces gradients in an order of its own",
        ),
        Replacement(
            "megatron.core.optimizer.optimizer:MegatronOptimizer.__init__",
            _checked_optimizer,
            "some optimizers are not covered; every one of Megatron's passes here, wherever it is built",
        ),
    )


def _variables() -> dict[str, str]:
    """Return what numerics depend on. Raises ConfigError for a wrong value, and for one that CUDA started without."""
    import torch

    device = _device()
    _refuse([str(problem) for problem in environment.flash_problems(device, True, os.environ)])
    variables = environment.settings(device, os.environ)
    late = [f"{name}={value}" for name, value in variables.items() if os.environ.get(name) != value]
    if late and torch.cuda.is_initialized():
        _refuse([f"{', '.join(late)}: CUDA has started without; import this module before, or set them in the shell"])
    return variables


def _device() -> str:
    return "gpu" if gpus.visible() else "cpu"


def _checked_and_initialised(original: Callable[..., None], numerics: NumericsSettings) -> Callable[..., None]:
    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        call = signature(original).bind(self, *args, **kwargs)
        call.apply_defaults()
        config, positions = call.arguments["config"], call.arguments["position_embedding_type"]
        if (arithmetic := numerics.arithmetic) is not None:
            import torch

            arithmetic.require_machine(torch.cuda.current_device() if _device() == "gpu" else None)  # once a process
        problems = _problems(config, numerics, vocab_size=call.arguments["vocab_size"])
        for name in ROTARY:  # fields of Bridge's providers, which numerics=portable reads
            setattr(config, name, call.arguments[name])
        if positions not in POSITIONS:
            problems.append(f"position_embedding_type={positions}: only {' and '.join(POSITIONS)} are covered")
        if numerics.mode != MODES[0] and call.arguments["seq_len_interpolation_factor"]:
            problems.append("positions that are interpolated have no portable version; leave it unset")
        if not call.arguments["parallel_output"]:
            problems.append("logits that are gathered have no invariant version; parallel_output=True")
        _refuse(problems)
        original(self, *args, **kwargs)
        if config.perform_initialization:
            import torch
            import torch.distributed as dist

            from tp_invariant_recipes.numerics.megatron.init import initialise

            seed = [torch.initial_seed()]
            dist.broadcast_object_list(seed, src=0)
            initialise([self], seed=seed[0])
        if invariant.ends:
            self.register_forward_pre_hook(_within)

    return __init__


def _only_subclasses_of(target: str, refusal: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Wrap the constructor of a base class: of its subclasses only `target`, MODULE:CLASS, can be built."""

    def wrapper(original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            if not isinstance(self, pkgutil.resolve_name(target)):
                _refuse([f"{type(self).__name__} {refusal}"])
            original(self, *args, **kwargs)

        return __init__

    return wrapper


def _invariant_layers(original: Callable[..., Any], numerics: NumericsSettings) -> Callable[..., Any]:
    @wraps(original)
    def submodules(*args: Any, **kwargs: Any) -> Any:
        from tp_invariant_recipes.numerics.megatron import spec

        return spec.invariant(original(*args, **kwargs), own=numerics.arithmetic.layers if numerics.arithmetic else {})

    return submodules


def _checked_ddp(original: Callable[..., None], numerics: NumericsSettings) -> Callable[..., None]:
    @wraps(original)
    def __init__(self: Any, config: Any, ddp_config: Any, *args: Any, **kwargs: Any) -> None:
        import torch

        ddp = catalogue.values_of(ddp_config)
        ddp["grad_reduce_in_fp32"] |= config.params_dtype == torch.float32
        _refuse(_problems(config, numerics, ddp=ddp))
        original(self, config, ddp_config, *args, **kwargs)

    return __init__


def _checked_optimizer(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def __init__(self: Any, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        _refuse([_plain(str(problem)) for problem in catalogue.refused_of("optimizer", config)])
        original(self, optimizer, config, *args, **kwargs)

    return __init__


def _plain(line: str) -> str:
    """Return a problem as a program of its own has it: without the sections of our configuration."""
    line = re.sub(r"^numerics=\w+: |\b(model|ddp|optimizer)\.(?=\w)", "", line)
    return line.replace("numerics.virtual_shards", SHARDS)


def _problems(
    config: Any, numerics: NumericsSettings, vocab_size: int | None = None, ddp: dict[str, Any] | None = None
) -> list[str]:
    """Return what a recipe would be refused for, told of a TransformerConfig.

    The length of the sequences is not known here: any is as good as one that every rule takes. A norm whose weight
    gradient V does not divide refuses them, and the router of experts on a CPU.
    """
    from megatron.core import parallel_state

    shards = numerics.virtual_shards or 1
    import torch

    model = {name: value for name, value in _relevant_fields(config).items() if name != "hybrid_layer_pattern"} | {
        "vocab_size": vocab_size or shards,
        "seq_length": shards * VECTORS,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        # What counts is torch's flag, which Megatron-Core sets by the field with bf16=True alone.
        "disable_bf16_reduced_precision_matmul": not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    }
    sections = {
        "numerics": asdict(numerics),
        "mixed_precision": "bf16_mixed" if config.bf16 else None,
        "model": model,
        "parallel": {"data_parallel_size": parallel_state.get_data_parallel_world_size()},
        "ddp": ddp or {},
        "device": {"kind": _device()},
    }
    problems = [_plain(str(problem)) for problem in broken_rules(RunConfig(sections), invariance.RULES)]
    if config.calculate_per_token_loss:
        problems.append("calculate_per_token_loss: who counts the tokens is not known here; leave it unset")
    if _device() == "gpu" and not config.deterministic_mode:
        problems.append("kernels that add in no fixed order repeat no bits; deterministic_mode=True")
    return problems


def _relevant_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a TransformerConfig without those that no rule knows and that have their default."""
    defaults = {f.name: f.default_factory() if callable(f.default_factory) else f.default for f in fields(config)}
    return {
        name: value
        for name, value in vars(config).items()
        if name in model.KNOWN or (name in defaults and name[0] != "_" and value != defaults[name])
    }


def _refuse(problems: list[str]) -> None:
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(f"{SWITCH}=1 does not cover this:{listed}", problems)


class Invariant:
    """Patch mode: it makes Megatron-Core's GPTModel invariant in this process. `tpi.invariant` is the only one.

    Attributes:
        enabled: Whether it is in force.
        ends: Whether it is in force for a block, and not for good.
    """

    enabled = ends = False

    @contextmanager
    def __call__(self, *, virtual_shards: int = 8, numerics: str = "tree") -> Iterator[None]:
        """Make models invariant that the block builds. It trains them, too: afterwards they refuse to run.

        On a machine without GPUs the block computes on the CPU.

        Args:
            virtual_shards: The largest tensor-parallel degree, a power of two; all up to it compute the same bits.
            numerics: "tree", or "portable" for the bits of any machine.

        Raises:
            TpiError: A value is wrong, patch mode is in force, or CUDA has started with other environment variables.
        """
        undo = self._install(virtual_shards, numerics)
        self.ends = True
        try:
            yield
        finally:
            self.enabled = self.ends = False
            undo()

    def enable(self, *, virtual_shards: int = 8, numerics: str = "tree") -> None:
        """Make models invariant from here on, for good.

        Args:
            virtual_shards: As for the block.
            numerics: As for the block.

        Raises:
            TpiError: As for the block.
        """
        self._install(virtual_shards, numerics)

    def _install(self, virtual_shards: int, numerics: str) -> Callable[[], None]:
        if self.enabled:
            raise ConfigError("patch mode is in force already, by tpi.invariant or by the environment")
        settings = switched_on({SWITCH: "1", SHARDS: str(virtual_shards), NUMERICS: numerics})
        assert settings is not None, "it is switched on"
        with ExitStack() as host:
            if _device() == "cpu":
                from tp_invariant_recipes.cpu_host import cpu

                host.enter_context(nullcontext() if cpu.depth else cpu.megatron_core())
            host.callback(install(settings))
            self.enabled = True
            return host.pop_all().close


invariant = Invariant()


def _within(*_: Any) -> None:
    if not invariant.enabled:
        raise ConfigError("the block of tpi.invariant() that built this model has ended: train it within")


if (_numerics := switched_on(dict(os.environ))) is not None:
    install(_numerics)
    invariant.enabled = True
