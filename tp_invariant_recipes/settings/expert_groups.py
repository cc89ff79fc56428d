# SPDX-License-Identifier: Apache-2.0
"""The expert groups of a run: X, its default, and what they make of a layout (numerics/sums/expert_groups.py)."""

from dataclasses import replace

from tp_invariant_recipes.numerics.sums.expert_groups import ExpertGroups
from tp_invariant_recipes.settings import finetuning
from tp_invariant_recipes.settings.run_config import RunConfig

PACKED, REPEATED = "dataset.enable_offline_packing", "model.mtp_use_repeated_layer"


def groups(config: RunConfig) -> ExpertGroups | None:
    """Return the order of experts' gradients on a run's ranks; None: it has no experts, or stock numerics."""
    numerics, at = config.numerics, config.layout
    if not (numerics.invariant and config.shape.experts):
        return None
    contexts = numerics.context_shards or at.cp
    return ExpertGroups(numerics.expert_groups, numerics.data_shards or at.dp, contexts, at.tp, at.cp, at.dp, at.ep)


def adds_several_times(config: RunConfig) -> str | None:
    """Return the key with which a backward pass adds to an expert's gradient several times, one source after the other.

    A rank that computes several data shards then adds all of a shard first; an owner with tokens of several ranks, all
    of a use first. So shards of one group would come in another order in every layout.
    """
    if finetuning.packing(config) is not None:
        return PACKED
    return REPEATED if config.model.get("mtp_use_repeated_layer") else None


def groups_of_run(config: RunConfig) -> int | None:
    """Return X of a run that names none: the least that its layout, D and C can have; None: it has no experts."""
    sums = groups(config)
    if sums is None:
        return None
    least = sums.data * sums.places[1] if adds_several_times(config) else replace(sums, groups=None).least
    return max(1, least)
