"""A composed tree with our own sections typed: `config.slurm.time`, which mypy checks. Bridge's stay mappings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tp_invariant_recipes.settings.sections import (
    OWN_SECTIONS,
    ClusterSettings,
    DataSettings,
    DeviceSettings,
    LauncherSettings,
    LedgerSettings,
    LoggingSettings,
    NumericsSettings,
    ParallelSettings,
    PatchesSettings,
    RecipeSettings,
    RunSettings,
    SlurmSettings,
    WeightsSettings,
)

Tree = Mapping[str, Any]  # section -> fields, as Hydra composes it


@dataclass(frozen=True)
class RunConfig:
    """What a run is made of.

    bridge: the sections of Bridge's ConfigContainer by their names, fields as conf/ and overrides have them.
    """

    run: RunSettings
    numerics: NumericsSettings
    parallel: ParallelSettings
    data: DataSettings
    weights: WeightsSettings
    device: DeviceSettings
    ledger: LedgerSettings
    patches: PatchesSettings
    cluster: ClusterSettings
    slurm: SlurmSettings
    launcher: LauncherSettings
    logging: LoggingSettings
    recipe: RecipeSettings
    bridge: Mapping[str, Any]

    @property
    def model(self) -> dict[str, Any]:
        """The fields of Bridge's provider."""
        return self.bridge["model"]


def typed(tree: Tree) -> RunConfig:
    """A tree whose fields have been checked, typed. A section or field of ours that it lacks has its default."""
    own = {name: cls(**tree.get(name, {})) for name, cls in OWN_SECTIONS.items()}
    return RunConfig(**own, bridge={name: fields for name, fields in tree.items() if name not in OWN_SECTIONS})
