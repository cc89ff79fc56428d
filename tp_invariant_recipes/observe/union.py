# SPDX-License-Identifier: Apache-2.0
"""What all ranks have together: Python objects, and texts and numbers without an object of every rank on every rank.

For the latter, ranks exchange keys, 8 bytes an entry, and the first rank that has an entry gives its text. So what
arrives grows with what there is in the model, and only the keys grow with the number of ranks.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

# As StepRecord has it: a kind of digest, "copies", "forward" or "backward"; the tensor; ranks by what they hold of it.
Diverged = tuple[tuple[str, str, tuple[tuple[int, ...], ...]], ...]


def gathered(value: Any, group: Any = None) -> list[Any]:
    """Return what every rank has, in the order of ranks. A collective of a group; None: of the whole world."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def gathered_by_first(value: Any) -> list[Any]:
    """On the first rank, what every rank has, in the order of ranks; elsewhere nothing. A collective of the world."""
    everyone: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(value, everyone or None)
    return everyone


def by_value(held: Mapping[int, Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Rank → lanes, as groups of ranks that hold the same."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, lanes in held.items():
        groups.setdefault(tuple(lanes), []).append(rank)
    return tuple(map(tuple, groups.values()))


_RANKS = 1 << 10  # whose keys are looked through at once


def keys_of(texts: Sequence[str]) -> np.ndarray:
    """int64 [texts], none of them 0. Two of a million have one key with a probability of 2^-25."""
    return np.array([xxhash.xxh3_64_intdigest(text.encode()) or 1 for text in texts], dtype=np.uint64).view(np.int64)


def keys_of_all(keys: np.ndarray, device: torch.device) -> np.ndarray:
    """Return the keys of all ranks: int64 [ranks, most keys of a rank], filled with 0. A collective of the world."""
    width = torch.tensor([len(keys)], device=device)
    dist.all_reduce(width, op=dist.ReduceOp.MAX)
    padded = torch.zeros(max(1, int(width.item())), dtype=torch.int64, device=device)
    padded[: len(keys)] = torch.from_numpy(keys)
    table = torch.empty(dist.get_world_size() * len(padded), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(table, padded)
    return table.cpu().numpy().reshape(-1, len(padded))


def holders(table: np.ndarray, keys: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Count the ranks that have each of this rank's keys, and those of them that come before this one.

    table:   of all ranks, as `keys_of_all` gives it. keys: int64 [n], different from each other.
    returns: int64 [n], int64 [n].
    """
    order = np.argsort(keys)
    ordered, count, before = keys[order], np.zeros(len(keys), np.int64), np.zeros(len(keys), np.int64)
    for first in range(0, len(table) if len(keys) else 0, _RANKS):
        rows = table[first : first + _RANKS]
        at = np.searchsorted(ordered, rows).clip(max=len(keys) - 1)
        row, column = np.nonzero(ordered[at] == rows)
        which = order[at[row, column]]
        count += np.bincount(which, minlength=len(keys))
        before += np.bincount(which[row + first < rank], minlength=len(keys))
    return count, before


def union(texts: Sequence[str], device: torch.device) -> list[tuple[int, str]]:
    """Return every text that any rank has, once, with its first rank, by rank. A collective of the whole world."""
    mine = list(dict.fromkeys(texts))
    keys = keys_of(mine)
    _, before = holders(keys_of_all(keys, device), keys, dist.get_rank())
    told = [text for text, others in zip(mine, before, strict=True) if not others]
    data = json.dumps(told).encode() if told else b""
    lengths = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    lengths[dist.get_rank()] = len(data)
    ends = np.cumsum(summed(lengths).cpu().numpy())
    joined = torch.zeros(int(ends[-1]), dtype=torch.uint8, device=device)
    if data:
        end = int(ends[dist.get_rank()])
        joined[end - len(data) : end] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    whole = summed(joined).cpu().numpy().tobytes() if len(joined) else b""
    starts = [0, *ends.tolist()]
    return [
        (rank, text)
        for rank, (start, end) in enumerate(zip(starts, ends.tolist(), strict=False))
        if end > start
        for text in json.loads(whole[start:end])
    ]


def summed(values: Tensor) -> Tensor:
    """Return the sum over all ranks, in place. Integers wrap around."""
    if dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values
