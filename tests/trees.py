# SPDX-License-Identifier: Apache-2.0
"""Configurations with single fields changed, as no command line would."""

import copy
from typing import Any

from tp_invariant_recipes.settings.run_config import RunConfig


def with_fields(config: RunConfig, **fields: Any) -> RunConfig:
    """A copy of a configuration with other fields, named section__field."""
    sections = copy.deepcopy(dict(config.sections))
    for name, value in fields.items():
        section, field = name.split("__")
        sections.setdefault(section, {})[field] = value
    return RunConfig(sections)
