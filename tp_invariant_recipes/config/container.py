# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge's ConfigContainer of a run. Importing Bridge takes seconds, so it happens here."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from tp_invariant_recipes.check.invariant import model as model_rules
from tp_invariant_recipes.errors import OR_STOCK, ConfigError, lines, listed, refuse
from tp_invariant_recipes.fields import catalogue
from tp_invariant_recipes.fields.field import as_text
from tp_invariant_recipes.machine.versions import installed
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.replacement import Replacement, applied
from tp_invariant_recipes.settings import delta_net, environment, finetuning, low_precision, schema
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.sources import recipe_layer
from tp_invariant_recipes.text import shortened

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

# The field of each provider that says which layers it has.
SPEC_FIELDS = {
    "GPTModelProvider": "transformer_layer_spec",
    "HybridModelProvider": "hybrid_stack_spec",
    "MLAModelProvider": "transformer_layer_spec",
}
_SPEC = "tp_invariant_recipes.numerics.megatron.spec"
_DELTA_BLOCK = f"tp_invariant_recipes.{families.DELTA_BLOCK.replace(':', '.')}"
_LATENT = "tp_invariant_recipes.numerics.megatron.attention.mla"
# What stands there under stock numerics, where it is not the provider's own: Bridge's default has no MLA.
STOCK_SPECS = {"MLAModelProvider": f"{_LATENT}.mla_block_spec"}
# What stands there when `model.transformer_impl=local`: Megatron-Core's own layers.
LOCAL_SPECS = {
    "GPTModelProvider": "megatron.bridge.models.gpt_provider.local_layer_spec",
    "HybridModelProvider": "tp_invariant_recipes.numerics.megatron.spec.local_hybrid_spec",
    **STOCK_SPECS,
}
# What stands there under any numerics but stock.
INVARIANT_SPECS = {
    "GPTModelProvider": f"{_SPEC}.invariant_layer_spec",
    "HybridModelProvider": "tp_invariant_recipes.numerics.megatron.spec.invariant_hybrid_spec",
    "MLAModelProvider": f"{_LATENT}.invariant_mla_block_spec",
}

# What Megatron-Core refuses where Transformer Engine is not installed, although the nodes may have it: these fields,
NEED_TE = ("apply_rope_fusion", "moe_permute_fusion")
# all that asks for its version, and what looks at its optimizer.
NEWEST_TE = Replacement(
    "megatron.core.utils:_te_version",
    lambda _: Version("999"),
    "a login node without Transformer Engine would refuse whatever needs some version of it",
)


class _FusedAdam:
    """Arguments for which Megatron-Core's OptimizerConfig searches Transformer Engine's optimizer."""

    def __init__(
        self, master_weight_dtype: Any, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, use_decoupled_grad: Any
    ) -> None: ...


@contextmanager
def _as_on_a_node_with_te() -> Iterator[None]:
    optimizers = ModuleType("transformer_engine.pytorch.optimizers")
    optimizers.FusedAdam = _FusedAdam  # type: ignore[attr-defined]
    sys.modules[optimizers.__name__] = optimizers
    try:
        with applied([NEWEST_TE]):
            yield
    finally:
        del sys.modules[optimizers.__name__]


def build(config: RunConfig) -> ConfigContainer:
    """Return the ConfigContainer that a configuration describes, every field checked against Bridge's types.

    Raises ConfigError listing all fields that do not exist or do not fit.
    """
    converted: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for name, fields in config.sections.items():
        if name in schema.SECTIONS and isinstance(fields, dict):
            converted[name], wrong = schema.convert_section(name, config.sections)
            problems += lines(wrong.values())
    if problems:
        raise ConfigError(listed(problems))
    from megatron.bridge.training.config import ConfigContainer

    tokenizer = converted["tokenizer"]  # the size of a NullTokenizer counts the end-of-document id, its last one
    includes_eod = tokenizer.pop("vocab_includes_eod")
    if tokenizer["tokenizer_type"] == "NullTokenizer" and not includes_eod:
        tokenizer["vocab_size"] += 1
    _layers(config, converted["model"])
    parts = {
        name: schema.section_class(name, config.sections)(**values)
        for name, values in converted.items()
        if name in schema.BRIDGE_SECTIONS or name == "mixed_precision"
    }
    parts.setdefault("mixed_precision", config.mixed_precision)
    if low_precision.fp8_layers(config) is not None:
        parts["mixed_precision"] = _for_invariant_layers(parts["mixed_precision"])
    provider = parts["model"]
    numerics = config.numerics
    if numerics.invariant:
        provider.invariant_mode, provider.virtual_shards = numerics.mode, numerics.virtual_shards
        provider.context_shards = numerics.context_shards or provider.context_parallel_size
        provider.data_shards, provider.expert_groups = numerics.data_shards, numerics.expert_groups
        provider.fp8_layers = low_precision.fp8_layers(config)
    if numerics.initial_weights == "invariant" and config.weights.folder is None:
        from tp_invariant_recipes.numerics.megatron import init

        provider.register_pre_wrap_hook(partial(init.initialise, seed=config.section("rng")["seed"]))
        if numerics.invariant and config.device.kind == "cpu":
            provider.perform_initialization = False  # Megatron would draw all weights before, on one thread
    # Examples are packed in the run's own folder, since Bridge would take another run's rows of other examples.
    specs, folder = getattr(parts["dataset"], "offline_packing_specs", None), finetuning.index_folder(config)
    parts["model"].packed_sequences = specs is not None
    if specs is not None and folder is not None:
        specs.packed_train_data_path = folder / "training.idx.parquet"
        specs.packed_val_data_path = folder / "validation.idx.parquet"
        specs.packed_metadata_path = folder / "packing.json"
    if specs is not None and not config.section("validation").get("eval_iters"):
        parts["dataset"].do_validation = False  # Bridge would pack a file that nobody needs
    if finetuning.adapts(config) and config.weights.folder is not None:  # Bridge asks where the base weights are
        parts["checkpoint"].pretrained_checkpoint = config.weights.folder
    if config.numerics.invariant:
        # The leaf of every sum over data is a sequence: a micro-batch of several is computed one by one.
        parts["train"].micro_batch_size = parts["validation"].eval_micro_batch_size = 1
    # Bridge sets these too, so that code which does not go through our launcher computes the same bits.
    variables = environment.of_run(config)
    container = ConfigContainer(**parts, env_vars=variables)
    recipe_layer.restore(container, config.recipe)
    return container


def imported_folder(config: RunConfig) -> Path | None:
    """Return the Hugging Face checkpoint that the weights are to come from; None: a checkpoint of the run has them, or
    they are new.
    """
    folder = config.weights.folder
    # A checkpoint of adapters has no other weights.
    begins = config.section("checkpoint").get("load") is None or finetuning.adapts(config)
    return Path(folder) if folder is not None and begins else None


def validate(container: ConfigContainer, world_size: int, *, here: bool = True, typed: Collection[str] = ()) -> None:
    """Run Bridge's own validation as a rank would, for `world_size` ranks.

    here: whether they will run on this machine. If not, and Transformer Engine is missing here, what it takes is left
          for the nodes to find out.
    typed: paths that the command line sets. What Bridge would replace of them is refused.
    It finalizes the container in place, so give it one that is not used afterwards. Raises ConfigError for what Bridge
    refuses, and for what Bridge sets and the invariant numerics do not allow.
    """
    from unittest.mock import patch

    from megatron.bridge.training.config import runtime_config_update

    elsewhere = not here and installed("transformer-engine") is None
    for field in NEED_TE if elsewhere else ():
        setattr(container.model, field, False)
    variables = {"WORLD_SIZE": str(world_size), "RANK": "0"}
    before = _plain_values(container, typed)
    with patch.dict(os.environ, variables), _as_on_a_node_with_te() if elsewhere else nullcontext():
        try:
            runtime_config_update(container)
        except (AssertionError, ValueError, NotImplementedError, RuntimeError) as error:
            message = shortened(str(error)) or repr(error)
            words = set(re.findall(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)+", message))
            parts = {name: part for name in schema.BRIDGE_SECTIONS if (part := getattr(container, name)) is not None}
            keys = {word: name for name, part in reversed(parts.items()) for word in words if hasattr(part, word)}
            message += f" (keys: {', '.join(f'{keys[word]}.{word}' for word in sorted(keys))})" if keys else ""
            raise ConfigError(f"Megatron-Bridge refuses this configuration: {message}") from error
    now = _plain_values(container, before)
    replaced = [path for path, value in before.items() if not _stays(path, value, now.get(path, value))]
    lines = [f"{path}={before[path]}: Megatron-Bridge sets {now[path]} instead; leave it out" for path in replaced]
    refuse([*lines, *_changed_by_bridge(container)])


def _stays(path: str, value: str, new: str) -> bool:
    """Whether Bridge keeps a typed value. It appends layers ahead to a hybrid model's, behind a slash."""
    return new == value or (path == "model.hybrid_layer_pattern" and new.partition("/")[0] == value)


def _plain_values(container: ConfigContainer, paths: Iterable[str]) -> dict[str, str]:
    """Path -> value as text, of the fields among these that hold a number, a text, a truth value or a dtype."""
    import torch

    values = {}
    for path in paths:
        section, _, name = path.partition(".")
        value = getattr(getattr(container, section, None), name, None)
        if isinstance(value, bool | int | float | str | torch.dtype):
            values[path] = as_text(value)
    return values


def _changed_by_bridge(container: ConfigContainer) -> list[str]:
    """Fields that Bridge's validation has set and that the invariant numerics do not allow."""
    name = getattr(container.model, "invariant_mode", None)
    if name is None:
        return []
    changed = [
        str(problem)
        for section in catalogue.SECTIONS
        if (part := getattr(container, section)) is not None
        for problem in catalogue.refused_of(section, part)
    ]
    return [*(f"numerics={name}: Megatron-Bridge sets {line}" for line in changed), *([OR_STOCK] if changed else [])]


def _layers(config: RunConfig, model: dict[str, Any]) -> None:
    """Set the provider's layers, unless the run names some or uses stock layers of Transformer Engine."""
    from hydra.utils import get_method

    provider = config.model["_target_"].rpartition(".")[2]
    stock = LOCAL_SPECS if model["transformer_impl"] == "local" else STOCK_SPECS
    specs = INVARIANT_SPECS if config.numerics.invariant else stock
    if provider == "GPTModelProvider" and model_rules.mixed(config) and not config.numerics.invariant:
        specs = {provider: f"{_SPEC}.block_of_both"}
    if delta_net.has_it(config.model) and config.model.get(families.FIELD) in (None, delta_net.SPEC):
        model[families.FIELD] = get_method(INVARIANT_SPECS[provider] if config.numerics.invariant else _DELTA_BLOCK)
        return
    family = families.family_of(config.model)
    if family is not None and (config.numerics.invariant or model["transformer_impl"] == "local"):
        path = f"{_SPEC}.invariant_layer_spec" if config.numerics.invariant else families.BLOCK
        model[families.FIELD] = partial(get_method(path), family=family)
    elif provider in specs:
        model.setdefault(SPEC_FIELDS[provider], get_method(specs[provider]))


def _for_invariant_layers(precision: Any) -> Any:
    """Return a precision with FP8 as Megatron gets it: bf16.

    The invariant layers do what is in FP8 themselves (spec.py).

    Megatron would need Transformer Engine, which no CPU has, and open its contexts around layers that do not read them.
    """
    from megatron.bridge.training.mixed_precision import bf16_mixed

    plain = bf16_mixed()
    if isinstance(precision, str):
        return plain
    for name in low_precision.OF_FP8:
        setattr(precision, name, getattr(plain, name))
    return precision
