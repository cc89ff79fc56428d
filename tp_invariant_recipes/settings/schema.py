# SPDX-License-Identifier: Apache-2.0
"""Which keys exist and what they hold: ours from `settings.py`, Bridge's from its dataclasses.

Asking Bridge for its fields imports it (10 to 60 s), so what the table of its fields or no field can answer is answered
without it.
"""

import dataclasses
import functools
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tp_invariant_recipes.errors import ConfigError, Problem, TpiError
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.settings import conf_files, field_table, keys
from tp_invariant_recipes.settings.keys import did_you_mean, nearest
from tp_invariant_recipes.settings.sections import OWN_KEYS, OWN_SECTIONS
from tp_invariant_recipes.settings.values import WrongType, convert, is_text, named
from tp_invariant_recipes.start import bridge

BRIDGES = ("megatron.", "tp_invariant_recipes.")  # how the paths of classes begin that are no recipe's own
PROVIDER = "_target_"  # the field of `model` that names its class; of conf/model/ these:
LATENT = "megatron.bridge.models.mla_provider.MLAModelProvider"  # of models with multi-latent attention
PROVIDERS = (
    "megatron.bridge.models.gpt_provider.GPTModelProvider",
    "megatron.bridge.models.hybrid.hybrid_provider.HybridModelProvider",
    LATENT,
    *families.PROVIDERS,
)

# model.position_embedding_type: a vector for each position.
LEARNED = "learned_absolute"

# Fields that take more than their class says.
WIDER: dict[str, Any] = {"q_lora_rank": int | None}  # None: queries have no latent
# The same of one class, whose defaults are of other types than it says.
WIDER_IN: dict[str, dict[str, Any]] = {
    "Gemma3ModelProvider": {"window_size": int},
    "OlMoEModelProvider": {"init_method_std": float},
}
# The field of `dataset` that names its class, too, where that is not the one of pretraining.
SFT_DATASET = "megatron.bridge.data.builders.gpt_sft.GPTSFTDatasetConfig"

# The sections of Bridge's ConfigContainer that a run may set, and the class behind each; `model` is the provider
# that the model's file names in `_target_`.
BRIDGE_SECTIONS: dict[str, str] = {
    "model": PROVIDER,
    "train": "megatron.bridge.training.config.TrainingConfig",
    "optimizer": "megatron.bridge.training.config.OptimizerConfig",
    "scheduler": "megatron.bridge.training.config.SchedulerConfig",
    "ddp": "megatron.bridge.training.config.DistributedDataParallelConfig",
    "dataset": "megatron.bridge.training.config.GPTDatasetConfig",
    "tokenizer": "megatron.bridge.training.config.TokenizerConfig",
    "checkpoint": "megatron.bridge.training.config.CheckpointConfig",
    "validation": "megatron.bridge.training.config.ValidationConfig",
    "logger": "megatron.bridge.training.config.LoggerConfig",
    "rng": "megatron.bridge.training.config.RNGConfig",
    "dist": "megatron.bridge.training.config.DistributedInitConfig",
    "rerun_state_machine": "megatron.bridge.training.config.RerunStateMachineConfig",
    "profiling": "megatron.bridge.training.config.ProfilingConfig",
    "straggler": "megatron.bridge.training.config.StragglerDetectionConfig",
    "nvrx_straggler": "megatron.bridge.training.config.NVRxStragglerDetectionConfig",
    "ft": "megatron.bridge.training.config.FaultToleranceConfig",
    "tensor_inspect": "megatron.bridge.training.config.TensorInspectConfig",
    "peft": "megatron.bridge.peft.lora.LoRA",
    "inprocess_restart": "megatron.bridge.training.config.InProcessRestartConfig",
    "comm_overlap": "megatron.bridge.training.comm_overlap.CommOverlapConfig",
}

# mixed_precision is either the name of one of Bridge's recipes or the fields of its class.
MIXED_PRECISION = "megatron.bridge.training.mixed_precision.MixedPrecisionConfig"

SECTIONS = frozenset((*OWN_SECTIONS, *BRIDGE_SECTIONS, "mixed_precision"))


def section_class(section: str, sections: Mapping[str, Any]) -> type:
    """Return the dataclass behind a section."""
    return OWN_SECTIONS.get(section) or bridge_class(_path(section, sections))


def _path(section: str, sections: Mapping[str, Any]) -> str:
    """Return the dotted path of the class of Bridge's behind a section."""
    path = MIXED_PRECISION if section == "mixed_precision" else BRIDGE_SECTIONS[section]
    if section == "dataset":
        return str(sections[section].get(PROVIDER, path))
    return str(sections[section][path]) if path == PROVIDER else path


def keys_of(word: str) -> list[str]:
    """Get the keys that a word may mean, in any section: short keys, flags of Megatron-LM, groups, and exact fields."""
    _, table = field_table.table()
    classes = BRIDGE_SECTIONS | {"model": PROVIDERS[0]}
    paths = [f"{section}.{word}" for section, path in classes.items() if word in table.get(path, ())]
    paths += [f"{section}.{word}" for section, own in OWN_SECTIONS.items() if word in fields(own)]
    return [*(keys.suggestions(word) or [name for name in conf_files.group_names() if name == word.lower()] or paths)]


def takes_text(path: str) -> bool:
    """Whether a field takes text and nothing else, by our sections or the table of Bridge's fields."""
    section, _, name = path.partition(".")
    if section in OWN_SECTIONS:
        return is_text(fields(OWN_SECTIONS[section]).get(name))
    known = {"mixed_precision": MIXED_PRECISION, **BRIDGE_SECTIONS}.get(section, "")
    table = field_table.table()[1] if name and known else {}
    hints = [table[cls][name] for cls in (PROVIDERS if known == PROVIDER else (known,)) if name in table.get(cls, ())]
    return bool(hints) and is_text(hints[0])


@functools.cache
def bridge_class(path: str) -> type:
    """One of Bridge's classes of settings by its dotted path. Imports Bridge. Raises ConfigError."""
    bridge.load()
    return _located(path)


def _located(path: str) -> type:
    cls = named(path)
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ConfigError(f"{path} is not one of Megatron-Bridge's classes of settings (tpi doctor shows the versions)")
    return cls


def write_field_table(file: Path) -> None:
    """Write down the fields of all sections and of the models' providers. Raises OSError, ConfigError."""
    bridge.load()
    paths = [*BRIDGE_SECTIONS.values(), MIXED_PRECISION, *PROVIDERS]
    classes = {path: _located(path) for path in paths if path != PROVIDER}
    field_table.write(file, {path: (cls, fields(cls)) for path, cls in classes.items()})


@functools.cache
def fields(cls: type) -> dict[str, Any]:
    """Field name -> type hint of everything that can be set on `cls`."""
    try:
        hints = typing.get_type_hints(cls)
    except (NameError, TypeError):  # a hint that only a type checker can resolve
        hints = {f.name: (f.type if not isinstance(f.type, str) else Any) for f in dataclasses.fields(cls)}
    wider = WIDER | WIDER_IN.get(cls.__name__, {})
    hints |= {name: hint for name, hint in wider.items() if name in hints}
    return {f.name: hints.get(f.name, Any) for f in dataclasses.fields(cls) if f.init and f.name[0] != "_"}


def is_default(section: str, sections: Mapping[str, Any], name: str, value: Any) -> bool:
    """Whether a field has the default of its class, which imports Bridge; where it is not installed, none has.

    A field that the table of fields lacks has no default, whatever is installed.
    """
    try:
        path = _path(section, sections)
        if not path.startswith(BRIDGES) or name not in field_table.read().get(path, (name,)):
            return False
        return has_default(section_class(section, sections), name, value)
    except (TpiError, KeyError):
        return False


def has_default(cls: type, name: str, value: Any) -> bool:
    """Whether a value is the default of a field of a dataclass. False is not 0 here."""
    field = next((field for field in dataclasses.fields(cls) if field.name == name), None)
    if field is None:
        return False
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return type(default) is type(value) and bool(default == value)


def convert_section(section: str, sections: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Problem]]:
    """Return the section's values, converted, and what is wrong: path -> problem. A section of Bridge's imports it."""
    cls = section_class(section, sections)
    return _converted(section, sections, cls.__name__, fields(cls))


def check_section(
    section: str, sections: Mapping[str, Any], requested: Collection[str], table: field_table.Hints
) -> tuple[dict[str, Any], dict[str, Problem]]:
    """Convert as `convert_section` does; Bridge is imported only where the table lacks the class, or the type of a
    requested field.

    requested: fields that the user has set. Without any, a section that only Bridge can check stays as it is.
    table: as `field_table.read` has it.
    """
    if section in OWN_SECTIONS:
        return convert_section(section, sections)
    path = _path(section, sections)
    known = path in table and (
        not path.startswith(BRIDGES) or all(table[path].get(name, Any) is not None for name in requested)
    )
    if known:
        return _converted(section, sections, path.rpartition(".")[2], table[path])
    return convert_section(section, sections) if requested else ({}, {})


def _converted(
    section: str, sections: Mapping[str, Any], cls: str, hints: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Problem]]:
    """hints: None for a field whose values are left as they are."""
    values: dict[str, Any] = {}
    problems: dict[str, Problem] = {}
    for name, value in sections[section].items():
        path = f"{section}.{name}"
        if name == PROVIDER and section in ("model", "dataset"):
            continue
        if path not in OWN_KEYS and name not in hints:
            known = (f"{section}.{name}" for name in hints)
            offer = did_you_mean(keys_of(name)) or nearest(path, known)
            problems[path] = Problem(path, f"no such field of {cls}{offer}", rule="no_such_field")
            continue
        hint = OWN_KEYS.get(path, hints.get(name))
        try:
            values[name] = value if hint is None else convert(value, hint)
        except WrongType as error:
            problems[path] = Problem(f"{path}={value}", str(error), rule="type")
    return values, problems
