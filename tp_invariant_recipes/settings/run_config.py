"""The configuration of a run: our own sections typed (`config.slurm.time`), Bridge's as mappings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tp_invariant_recipes.settings.sections import OWN_SECTIONS, OwnSections


@dataclass(frozen=True)
class RunConfig(OwnSections):
    """What a run is made of. Every field has been checked.

    sections: section -> fields, as Hydra composes them and `config.yaml` holds them. A section or field of ours that
              it lacks has its default.
    """

    sections: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name, cls in OWN_SECTIONS.items():
            object.__setattr__(self, name, cls(**self.section(name)))

    def section(self, name: str) -> dict[str, Any]:
        """The fields of a section; empty where the run does not have it."""
        return self.sections.get(name) or {}

    @property
    def model(self) -> dict[str, Any]:
        """The fields of Bridge's provider."""
        return self.sections["model"]

    @property
    def train(self) -> dict[str, Any]:
        """The fields of Bridge's TrainingConfig."""
        return self.section("train")

    @property
    def mixed_precision(self) -> Any:
        """The name of a recipe of Bridge's, fields of its MixedPrecisionConfig, or None: fp32."""
        return self.sections.get("mixed_precision")

    def with_fields(self, section: str, **fields: Any) -> "RunConfig":
        """The configuration with other values of some fields of a section."""
        return RunConfig({**self.sections, section: {**self.section(section), **fields}})
