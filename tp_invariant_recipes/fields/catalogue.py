# SPDX-License-Identifier: Apache-2.0
"""The catalogue: a field of Bridge has one row, by its section and name, or keeps its class's default."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.fields import model, optimizer, training
from tp_invariant_recipes.fields.field import NONE, BridgeField, BridgeSection, as_text
from tp_invariant_recipes.settings.schema import PROVIDER, has_default
from tp_invariant_recipes.settings.sections import OWN_KEYS

# In the order of messages. Of `model` and `mixed_precision`, rules of check/invariant/ say more.
SECTIONS: dict[str, BridgeSection] = {
    "optimizer": optimizer.OPTIMIZER,
    "ddp": optimizer.DDP,
    "dist": training.DIST,
    "train": training.TRAIN,
    "scheduler": optimizer.SCHEDULER,
    "dataset": training.DATASET,
    "tokenizer": training.TOKENIZER,
    "checkpoint": training.CHECKPOINT,
    "validation": training.VALIDATION,
    "logger": training.LOGGER,
    "rng": training.RNG,
    "rerun_state_machine": training.RERUN_STATE_MACHINE,
    "profiling": training.PROFILING,
    "straggler": training.STRAGGLER,
    "nvrx_straggler": training.NVRX_STRAGGLER,
    "ft": training.FT,
    "inprocess_restart": training.INPROCESS_RESTART,
    "tensor_inspect": training.TENSOR_INSPECT,
    "peft": training.PEFT,
    "comm_overlap": training.COMM_OVERLAP,
}
_ALL = SECTIONS | {"model": model.MODEL, "mixed_precision": optimizer.MIXED_PRECISION}


def field_at(path: str) -> BridgeField | None:
    """Return the row of a field by its dotted path; None: its section has none."""
    name, _, field = path.partition(".")
    return _ALL[name].field(field) if name in _ALL else None


def adjustable() -> Iterable[tuple[str, BridgeField]]:
    """Paths of the fields that `numerics.adjust` sets right by their rows alone."""
    for name, section in _ALL.items():
        for field, row in section.named.items():
            if row.adjusts:
                yield f"{name}.{field}", row


def values_of(config: Any) -> dict[str, Any]:
    """Return the fields of an object of Megatron's that can be set: name -> value."""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.init and f.name[0] != "_"}


def refused(section: str, given: Mapping[str, Any], is_default: Callable[[str, Any], bool]) -> list[Problem]:
    """One problem for every field whose value is not allowed: the reason, and the values that are.

    section: one of SECTIONS, or "model". given: name -> value, as a composed tree or an object of Megatron's has it.
    is_default: whether a field has its class's default; asked of fields that nobody has read, since it imports Bridge.
    """
    problems = []
    for name, value in given.items():
        key = f"{section}.{name}"
        if name == PROVIDER or key in OWN_KEYS:
            continue
        field = _ALL[section].field(name)
        if not field.allowed.accepts(value) and (field.allowed is not NONE or not is_default(name, value)):
            remedy = field.allowed.remedy.format(key=key)
            problems.append(Problem(f"{key}={as_text(value)}", field.why, remedy, rule="field"))
    return problems


def refused_of(section: str, part: Any) -> list[Problem]:
    """List what `refused` says of an object of Megatron's."""
    return refused(section, values_of(part), partial(has_default, type(part)))


def in_fingerprint(path: str) -> bool:
    """Whether comparable runs have the same value at a dotted path. So it is of a field without a row."""
    name, _, field = path.partition(".")
    return name not in _ALL or _ALL[name].field(field.partition(".")[0]).compared
