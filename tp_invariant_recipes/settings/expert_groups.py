"""The expert groups of a run: X, its default, and what they make of a layout (numerics/sums/expert_groups.py)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tp_invariant_recipes.numerics.sums.expert_groups import ExpertGroups
from tp_invariant_recipes.settings import sft
from tp_invariant_recipes.settings.run_config import RunConfig

# Keys that the default of numerics.expert_groups follows beside the layout: whether there are experts, and what adds to
# an expert's gradient several times in a backward pass.
PACKED = "dataset.enable_offline_packing"
SEVERAL = (PACKED, "model.mtp_use_repeated_layer")
OF_GROUPS = ("model.num_moe_experts", *SEVERAL)


def groups(config: RunConfig) -> ExpertGroups | None:
    """Return the order of experts' gradients on a run's ranks; None: it has no experts, or stock numerics."""
    numerics, at = config.numerics, config.layout
    if not (numerics.invariant and config.shape.experts):
        return None
    contexts = numerics.context_shards or at.cp
    return ExpertGroups(numerics.expert_groups, numerics.data_shards or at.dp, contexts, at.tp, at.cp, at.dp, at.ep)


def default_groups(layout_groups: ExpertGroups, named: Mapping[str, Any]) -> int | None:
    """X of a run that names none: the least that its layout can have; None: it has no experts.

    layout_groups: with any X. named: the values of the keys of OF_GROUPS.
    """
    has_experts, *several = (named.get(key) for key in OF_GROUPS)
    if not has_experts:
        return None
    if any(several):
        return max(1, layout_groups.data * layout_groups.places[1])
    return max(1, replace(layout_groups, groups=None).least)


def groups_of_run(config: RunConfig) -> int | None:
    """`default_groups` of a run's layout, D and C."""
    layout_groups = groups(config)
    return None if layout_groups is None else default_groups(layout_groups, values_of_groups(config))


def values_of_groups(config: RunConfig) -> dict[str, Any]:
    """Return the values of the keys of OF_GROUPS."""
    packed = {PACKED: sft.packing(config) is not None}
    return {key: config.section(key.partition(".")[0]).get(key.partition(".")[2]) for key in OF_GROUPS} | packed
