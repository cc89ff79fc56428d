"""Which keys exist and what they hold: ours from `settings.py`, Bridge's from its dataclasses.

Asking for Bridge's fields imports Bridge (10 to 20 s), so what can be answered without it is.
"""

import dataclasses
import functools
import typing
from typing import Any

from tp_invariant_recipes.config.nearest import nearest
from tp_invariant_recipes.config.settings import OWN_KEYS, OWN_SECTIONS
from tp_invariant_recipes.config.values import WrongType, convert, named
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.host import bridge

# The sections of Bridge's ConfigContainer that a run may set, and the class behind each; `model` is the provider
# that the model's file names in `_target_`.
BRIDGE_SECTIONS: dict[str, str] = {
    "model": "_target_",
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
    "inprocess_restart": "megatron.bridge.training.config.InProcessRestartConfig",
    "comm_overlap": "megatron.bridge.training.comm_overlap.CommOverlapConfig",
}

# mixed_precision is either the name of one of Bridge's recipes or the fields of its class.
MIXED_PRECISION = "megatron.bridge.training.mixed_precision.MixedPrecisionConfig"

SECTIONS = frozenset((*OWN_SECTIONS, *BRIDGE_SECTIONS, "mixed_precision"))


def section_class(section: str, tree: dict[str, Any]) -> type:
    """The dataclass behind a section of the composed tree."""
    if section in OWN_SECTIONS:
        return OWN_SECTIONS[section]
    if section == "mixed_precision":
        return _bridge_class(MIXED_PRECISION)
    path = BRIDGE_SECTIONS[section]
    return _bridge_class(tree[section][path] if path == "_target_" else path)


@functools.cache
def _bridge_class(path: str) -> type:
    bridge.load()
    cls = named(path)
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ConfigError(f"{path} is not one of Megatron-Bridge's classes of settings (tpi doctor shows the versions)")
    return cls


@functools.cache
def fields(cls: type) -> dict[str, Any]:
    """Field name -> type hint of everything that can be set on `cls`."""
    try:
        hints = typing.get_type_hints(cls)
    except NameError:  # a hint that only a type checker can resolve
        hints = {f.name: (f.type if not isinstance(f.type, str) else Any) for f in dataclasses.fields(cls)}
    return {f.name: hints.get(f.name, Any) for f in dataclasses.fields(cls) if f.init and f.name[0] != "_"}


def convert_section(section: str, tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The section's values, converted, and what is wrong: path -> problem."""
    cls = section_class(section, tree)
    hints = fields(cls)
    values: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for name, value in tree[section].items():
        path = f"{section}.{name}"
        if name == "_target_":
            continue
        hint = OWN_KEYS.get(path, hints.get(name))
        if hint is None:
            known = (f"{section}.{name}" for name in hints)
            problems[path] = f"{path}: no such field of {cls.__name__}{nearest(path, known)}"
            continue
        try:
            values[name] = convert(value, hint)
        except WrongType as error:
            problems[path] = f"{path}={value}: {error}"
    return values, problems
