"""Gathers Python objects of all ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

# As StepRecord has it: a kind of digest, "copies", "forward" or "backward"; the tensor; ranks by what they hold of it.
Diverged = tuple[tuple[str, str, tuple[tuple[int, ...], ...]], ...]


def gathered(value: Any, group: Any = None) -> list[Any]:
    """Return what every rank has, in the order of ranks. A collective of a group; None: of the whole world."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def by_value(held: Mapping[int, Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Rank → lanes, as groups of ranks that hold the same."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, lanes in held.items():
        groups.setdefault(tuple(lanes), []).append(rank)
    return tuple(map(tuple, groups.values()))
