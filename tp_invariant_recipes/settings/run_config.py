"""The configuration of a run: our own sections typed (`config.slurm.time`), its layout, its shape, and mappings."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from tp_invariant_recipes.settings.model_shape import ModelShape
from tp_invariant_recipes.settings.sections import OWN_SECTIONS, OwnSections


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism. `world` is the number of ranks they need."""

    tp: int
    pp: int
    cp: int
    dp: int
    ep: int
    etp: int
    sp: bool

    @property
    def world(self) -> int:
        """Ranks: tp * pp * cp * dp."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def degrees(self) -> dict[str, int]:
        """Short keys of the degrees of parallelism and their values."""
        return {name: getattr(self, name) for name in ("tp", "pp", "cp", "dp", "ep", "etp")}

    def as_dict(self) -> dict[str, int | bool]:
        """Short keys and their values, for a ledger's header."""
        return {**self.degrees, "sp": self.sp}


@dataclass(frozen=True)
class RunConfig(OwnSections):
    """What a run is made of. Every field has been checked.

    sections: section -> fields, as Hydra composes them and `config.yaml` holds them. A section or field of ours that
              it lacks has its default; a field that only another version of tpi has is no error.
    """

    sections: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name, cls in OWN_SECTIONS.items():
            ours = {field.name for field in fields(cls)}
            known = {key: value for key, value in self.section(name).items() if key in ours}
            object.__setattr__(self, name, cls(**known))

    def section(self, name: str) -> dict[str, Any]:
        """Return the fields of a section; empty where the run does not have it."""
        return self.sections.get(name) or {}

    def at(self, path: str) -> Any:
        """Return a field by its dotted path. A field of ours has its default where it is not set, another one None."""
        section, _, name = path.partition(".")
        return getattr(getattr(self, section), name) if section in OWN_SECTIONS else self.section(section).get(name)

    @property
    def model(self) -> dict[str, Any]:
        """The fields of Bridge's provider."""
        return self.sections["model"]

    @cached_property
    def shape(self) -> ModelShape:
        """Sizes of the model and kinds of its layers."""
        return ModelShape(self.model)

    @cached_property
    def layout(self) -> Layout:
        """Degrees of parallelism; a field that is not set has Megatron's default."""
        model = self.model
        return Layout(
            tp=model.get("tensor_model_parallel_size", 1),
            pp=model.get("pipeline_model_parallel_size", 1),
            cp=model.get("context_parallel_size", 1),
            dp=self.parallel.data_parallel_size,
            ep=model.get("expert_model_parallel_size", 1),
            etp=model.get("expert_tensor_parallel_size", 1),
            sp=bool(model.get("sequence_parallel")),
        )

    @property
    def train(self) -> dict[str, Any]:
        """The fields of Bridge's TrainingConfig."""
        return self.section("train")

    @property
    def mixed_precision(self) -> Any:
        """The name of a recipe of Bridge's, fields of its MixedPrecisionConfig, or None: fp32."""
        return self.sections.get("mixed_precision")

    def with_fields(self, section: str, **fields: Any) -> "RunConfig":
        """Return the configuration with other values of some fields of a section."""
        return RunConfig({**self.sections, section: {**self.section(section), **fields}})
