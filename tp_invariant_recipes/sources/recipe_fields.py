# SPDX-License-Identifier: Apache-2.0
"""What a section of a recipe says, as a tree can hold it: plain values, which the type of a field turns into the same.

A tree holds text, numbers, lists and mappings. An object without a name by which another process could import it, such
as a lambda, is none of these. tpi refuses what it has no place for: other classes, and attributes that are no field.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from tp_invariant_recipes.settings import low_precision, schema
from tp_invariant_recipes.settings.keys import nearest
from tp_invariant_recipes.settings.values import WrongType, convert, named
from tp_invariant_recipes.sources import recipe_source

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

NAMED_PRECISION = "bf16_mixed"
MISSING = object()
_HOOKS = ("_pre_wrap_hooks", "_post_wrap_hooks")
_UNSET: tuple[Any, ...] = (None, [], {}, ())

_TOKENS = ("bos_token_id", "eos_token_id")
# Attributes that recipes and models set and that are no field: Bridge's scheduler takes both from `optimizer`; nobody
# reads the others.
UNREAD = {"scheduler.max_lr", "scheduler.min_lr", *(f"model.{n}" for n in ("moe_a2a_overlap", *_TOKENS))}
# A class of Bridge -> attributes that its recipes and models set beside its fields.
_OF_QWEN = {f"model.{name}" for name in ("head_dim", "hf_text_config", "audio_token_id", "moe_a2a_overlap")}
OF_BRIDGE = {
    "SchedulerConfig": UNREAD,
    "OptimizerConfig": {"optimizer.offload_optimizer_states"},
    "GPTModelProvider": {
        *(f"model.{name}" for name in ("moe_a2a_overlap", *_TOKENS)),
        *(f"model.rope_scaling_{name}" for name in ("low_freq_factor", "high_freq_factor")),  # unread
        "model.rope_scaling_original_max_position_embeddings",
    },
    "MLAModelProvider": {
        f"model.{name}"
        for name in (
            *("actual_vocab_size", "apply_dsa_kernel_fusion", "cp_partition_mode", "csa_compress_ratios"),
            *("csa_compress_rotary_base", "csa_window_size", "enable_hyper_connections", "fp8_param_gather"),
            *("mhc_sinkhorn_iterations", "moe_a2a_overlap", "moe_n_hash_layers", "mtp_eval_in_bf16", "norm_topk_prob"),
            *("num_residual_streams", "o_groups", "o_lora_rank", "use_fused_mhc"),
        )
    },
    **dict.fromkeys(
        ("Qwen3VLModelProvider", "Qwen3VLMoEModelProvider", "Qwen35VLModelProvider", "Qwen35VLMoEModelProvider"),
        _OF_QWEN,
    ),
}
# Classes that Bridge has in a section's place, and why tpi takes none of them.
NOT_HERE = {
    "DoRA": ": DoRA divides by norms of W + BA, sums over features that tp cuts",
    "CanonicalLoRA": ": its adapters of queries, keys and values are none of the layers that tpi knows",
    "DirectHFSFTDatasetConfig": ": it downloads its examples; a GPTSFTDatasetConfig with dataset.dataset_root",
}
# A word in the name of a model's field -> what the model takes beside text.
MODALITIES = {"vision": "images", "audio": "audio"}
# What a checked ConfigContainer has besides sections.
OTHER_FIELDS = {"env_vars", "mixed_precision", "optimizer_config_override_provider", "_checkpoint_load_required"}


def plain_fields(values: Mapping[str, Any], cls: type, stated: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that differ from the defaults of their class, and those of `stated`: name -> plain value.

    values: as `values` returns them. cls: the class that a run will have there.
    Returns the names of what no tree can hold, too.
    """
    hints = schema.fields(cls)
    defaults = {field.name: default(field) for field in dataclasses.fields(cls)}
    plain_values: dict[str, Any] = {}
    kept: list[str] = []
    for name, value in values.items():
        usual = defaults.get(name, MISSING)
        unset = isinstance(value, list | dict | tuple | None) and value in _UNSET and usual in _UNSET
        same = unset or value is usual or (type(value) is type(usual) and bool(value == usual))
        if same and not (name in stated and name in hints):
            continue
        text = plain(value, hints[name]) if name in hints else MISSING
        if text is not MISSING:
            plain_values[name] = text
        elif not same:
            kept.append(name)
    return plain_values, kept


def values(part: Any) -> Iterator[tuple[str, Any]]:
    """Every field and attribute of a section; of private ones the hooks that change a model after it is built."""
    names = {
        field.name: None for field in dataclasses.fields(part) if field.name[0] != "_" and hasattr(part, field.name)
    }
    names |= {name: None for name in vars(part) if name[0] != "_" or (name in _HOOKS and getattr(part, name))}
    return ((name, getattr(part, name)) for name in names)


def foreign(container: ConfigContainer) -> Iterator[str]:
    """Yield what tpi has no place for."""
    if not dataclasses.is_dataclass(container.model):
        yield f"its model is {type(container.model).__name__}, which is no class of settings"
    for name, path in schema.BRIDGE_SECTIONS.items():
        part = getattr(container, name)
        if path != schema.PROVIDER and part is not None:
            yield from _other_class(container, name, part, path)
    for path, why in unknown(container):
        if path not in OF_BRIDGE.get(why.partition(";")[0].rpartition(" ")[2], ()):
            yield f"{path}: {why}"
    for field in dataclasses.fields(container):
        if field.name not in (*schema.BRIDGE_SECTIONS, *OTHER_FIELDS) and getattr(container, field.name) is not None:
            yield f"{field.name}: tpi has no such section"


def _other_class(container: ConfigContainer, name: str, part: Any, path: str) -> Iterator[str]:
    """Yield why a section of a recipe cannot be used; nothing: it has the class that tpi trains with."""
    class_paths = (path, *([schema.SFT_DATASET] if name == "dataset" else []))
    wanted = [schema.bridge_class(class_path) for class_path in class_paths]
    if any(issubclass(cls, type(part)) for cls in wanted):
        return
    known = " and ".join(cls.__name__ for cls in wanted)
    modalities, why = _extra_modalities(container.model), NOT_HERE.get(type(part).__name__, "")
    if name == "dataset" and not modalities and own_data(part):
        return
    mismatch = f"its {name} is a {type(part).__name__}, and tpi trains with {known} only"
    more = name == "dataset" and modalities
    yield f"its model takes {modalities}: {mismatch}" if more else f"{mismatch}{why}"


def own_data(dataset: Any) -> bool:
    """Whether a dataset is of a class of the user's, which stock numerics train on as it is."""
    from megatron.bridge.training.config import DatasetProvider

    return isinstance(dataset, DatasetProvider) and not type(dataset).__module__.startswith("megatron.")


def _extra_modalities(model: Any) -> str:
    """Return what a model takes beside text, by the names of its fields; empty: text alone."""
    names = [field.name for field in dataclasses.fields(model)] if dataclasses.is_dataclass(model) else []
    parts = [name for name in names if name != "is_vision_language"]  # a model's of text, too
    return " and ".join(what for word, what in MODALITIES.items() if any(word in name.split("_") for name in parts))


def unknown(part: Any, prefix: str = "", seen: frozenset[int] = frozenset()) -> Iterator[tuple[str, str]]:
    """Yield the attributes of settings that are no field, and that no method of their class knows: path -> what is
    wrong.

    prefix: of the paths. Settings in settings count, too.
    """
    cls = type(part)
    known = {field.name for field in dataclasses.fields(cls)}
    for name, value in vars(part).items():
        if name[0] == "_":
            continue
        if name not in known and not hasattr(cls, name) and name not in _used_by_methods(cls):  # type: ignore[arg-type]
            yield f"{prefix}{name}", f"no such field of {cls.__name__}{nearest(name, known)}"
        elif _is_settings(value) and id(value) not in seen:
            yield from unknown(value, f"{prefix}{name}.", seen | {id(part)})


def _is_settings(value: Any) -> bool:
    """Whether a value is an object of Bridge's or of the recipe's own: transformers' have attributes of their own."""
    return (
        dataclasses.is_dataclass(value) and not isinstance(value, type) and "transformers" not in type(value).__module__
    )


@functools.cache
def _used_by_methods(cls: type) -> frozenset[str]:
    """Names of attributes in the code of a class and its bases: what they set themselves is no mistake."""
    functions = [value for base in cls.__mro__ for value in vars(base).values() if inspect.isfunction(value)]
    return frozenset(name for function in functions for name in function.__code__.co_names)


def default(field: dataclasses.Field) -> Any:
    """Return the default of a field; MISSING: it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING if field.default is dataclasses.MISSING else field.default


def required(cls: Any) -> bool:
    """Whether a class has a field without a default."""
    return any(default(field) is MISSING for field in dataclasses.fields(cls) if field.init)


def plain(value: Any, hint: Any) -> Any:
    """Return a value as a configuration file holds it, which the hint converts back; MISSING: there is none."""
    if hint is bool and type(value) is int:  # Bridge's own recipes have 100 for a yes
        return bool(value)
    text_of_it = serialize(value)
    if text_of_it is MISSING:
        return MISSING
    try:
        converted = convert(text_of_it, hint)
    except WrongType:
        return MISSING
    return text_of_it if converted is value or converted == value or _listed(converted) == _listed(value) else MISSING


def serialize(value: Any) -> Any:
    """Return a value as a configuration file has it; MISSING: no file can hold it."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str) and "${" in value:  # Hydra would resolve it
        return MISSING
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        parts = [serialize(part) for part in value]
        return MISSING if MISSING in parts else parts
    if isinstance(value, Mapping):
        return _serialize_mapping(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # of examples: how they become tokens
        return _serialize_mapping({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    path = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    # A recipe's own file has no name by which another process could import it.
    importable = callable(value) and not path.startswith(recipe_source.FILES) and named(path) is value
    return path if importable else MISSING


def _serialize_mapping(value: Mapping[Any, Any]) -> Any:
    parts = {key: serialize(part) for key, part in value.items()}
    plain = all(isinstance(key, str) for key in parts) and MISSING not in parts.values()
    return parts if plain else MISSING


def _listed(value: Any) -> Any:
    return [_listed(part) for part in value] if isinstance(value, list | tuple) else value


def precision(value: Any) -> Any:
    """Return a name of Bridge's, or the fields."""
    if value is None or isinstance(value, str):
        return value
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    names = (name for name in _presets() if value == get_mixed_precision_config(name))
    return next(names, None) or _precision_fields(value)


def preset(precision: Any) -> str | None:
    """Return the name of a precision, as `precision` has it, once its gradients are added in fp32; None: it has none
    then.
    """
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    if not isinstance(precision, dict):
        return None
    wanted = {**precision, "grad_reduce_in_fp32": True}
    named = ((name, _precision_fields(get_mixed_precision_config(name))) for name in _presets())
    return next((name for name, fields in named if fields == wanted), None)


def _presets() -> tuple[str, ...]:
    """Return the names of Bridge's that a configuration holds as names."""
    return (NAMED_PRECISION, *low_precision.NAMED)


def _precision_fields(value: Any) -> dict[str, Any]:
    hints = schema.fields(schema.bridge_class(schema.MIXED_PRECISION))
    fields = {name: plain(getattr(value, name), hint) for name, hint in hints.items()}
    return {name: plain for name, plain in fields.items() if plain is not MISSING}
