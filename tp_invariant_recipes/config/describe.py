# SPDX-License-Identifier: Apache-2.0
"""Describe configurations and models for people and machines."""

import json
from typing import Any

from tp_invariant_recipes.check import layout
from tp_invariant_recipes.check.rule import broken_rules
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.settings import conf_files
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.schema import BRIDGE_SECTIONS, PROVIDERS
from tp_invariant_recipes.settings.sections import OWN_KEYS
from tp_invariant_recipes.settings.values import value_text
from tp_invariant_recipes.sizing import memory
from tp_invariant_recipes.sizing.size import parameters

TP_DEGREES = (1, 2, 4, 8)


def bridge_overrides(config: RunConfig) -> list[str]:
    """`section.field=value` for every field of Bridge that a run sets, in the form of Bridge's command line."""
    lines = [
        # Bridge's command line knows a function by the last part of its path.
        f"{section}.{field}={value_text(value.rpartition('.')[2] if field == 'activation_func' else value)}"
        for section in BRIDGE_SECTIONS
        for field, value in config.section(section).items()
        if field != "_target_" and f"{section}.{field}" not in OWN_KEYS
    ]
    return [*lines, f"mixed_precision={value_text(config.mixed_precision)}"]


def table() -> str:
    """Return the file of settings/field_table.py: a row for each model of `conf/model/`, in JSON."""
    own = [name for name in conf_files.groups()["model"] if not conf_files.users_file("model", name)]
    return f"[\n{',\n'.join(json.dumps(model(name)) for name in own)}\n]\n"


def model(name: str) -> dict[str, Any]:
    """Return a row of the table: name, parameters, layers, hidden size, degrees of tp that divide it, whether a CPU
    can.

    memory: bytes that a rank on a GPU needs, about, for each of these degrees in order.
    """
    config = compose(name, device="gpu").config
    degrees = [tp for tp in TP_DEGREES if not broken_rules(_split(config, tp), layout.RULES)]
    return {
        "model": name,
        "summary": conf_files.summary("model", name),
        "parameters": parameters(config.shape),
        "layers": config.shape.layers or len(config.shape.pattern),
        "hidden_size": config.shape.hidden,
        "tp": degrees,
        "memory": [memory.estimate(_split(config, tp)).rank for tp in degrees],
        "cpu": config.model["_target_"] in PROVIDERS,
    }


def _split(config: RunConfig, tp: int) -> RunConfig:
    return config.with_fields("model", tensor_model_parallel_size=tp, sequence_parallel=tp > 1)
