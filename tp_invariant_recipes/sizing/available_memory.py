# SPDX-License-Identifier: Apache-2.0
"""Estimates before the start whether a run fits the memory of its GPUs or nodes."""

from dataclasses import dataclass

from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.machine import processor as host
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.sizing import memory
from tp_invariant_recipes.sizing.memory import GIB, MIB, Estimate
from tp_invariant_recipes.text import plural

# A run is refused only if it needs more even where all that the estimate does not count exactly is this part too high.
# It is on the safe side: docs/memory.md says how far above measured peaks.
ERROR = 0.3
NEAR = 0.95  # a run that needs more of the memory than this starts with a warning


# What lowers the estimate (docs/memory.md). Ranks on CPUs share the memory of their node.
_TOKENS = (
    "lower mbs= or seq=, model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1"
)
LOWER = {
    "gpu": f"raise tp= or pp=, of experts ep=, dp= with optimizer.use_distributed_optimizer=true, {_TOKENS}",
    "cpu": f"a smaller model (tpi models), {_TOKENS}",
}


@dataclass(frozen=True)
class AvailableMemory:
    """Available memory. size: bytes. what: its owner, for messages. whole: a node's for all its ranks, not a GPU's."""

    size: float
    what: str
    whole: bool = False


def room(config: RunConfig, *, here: bool) -> AvailableMemory | None:
    """Return the memory of the run's GPUs or node; None: not known. here: whether ranks run on this machine."""
    if config.device.kind == "gpu":
        visible = gpus.visible() if here else []
        if visible:
            return AvailableMemory(min(gpu.memory for gpu in visible), "a GPU of this machine")
        size = config.cluster.gpu_memory
        return None if size is None else AvailableMemory(size * GIB, f"a GPU of cluster={config.cluster.name}")
    available = host.available() if here else None
    return None if available is None else AvailableMemory(available, "this machine", whole=True)


def problems(config: RunConfig, *, here: bool) -> list[str]:
    """Return why the run cannot fit, with the overrides that lower the figures; empty: it may. here: as of `room`."""
    there = room(config, here=here) if config.device.check_memory else None
    if there is None:
        return []
    need = memory.estimate(config)
    least = need.least(ERROR)
    if (need.ranks * least + need.shared * (1 - ERROR) if there.whole else least) <= there.size:
        return []
    lines = [
        f"this run needs {_need_and_room(need, there)}:",
        *(f"    {line}" for line in table(need)),
        f"    lower it: {LOWER[config.device.kind]}; device.check_memory=false starts it anyway",
    ]
    return ["\n".join(lines)]


def warning(config: RunConfig, *, here: bool) -> str | None:
    """Why a run that is not refused may run out of memory, with the overrides that lower it. here: as for `room`."""
    needed = tight(config, here=here)
    if needed is None or problems(config, here=here):
        return None
    return f"memory is tight: this run needs {needed}; lower it: {LOWER[config.device.kind]}"


def tight(config: RunConfig, *, here: bool) -> str | None:
    """Return need and room of a run that needs nearly all of the memory; None: it does not, or not known."""
    there = room(config, here=here) if config.device.check_memory else None
    if there is None:
        return None
    need = memory.estimate(config)
    return _need_and_room(need, there) if (need.node if there.whole else need.rank) > NEAR * there.size else None


def _need_and_room(need: Estimate, there: AvailableMemory) -> str:
    wanted = f"{_gib(need.node)} on a node" if there.whole else f"{_gib(need.rank)} on a GPU"
    return f"about {wanted}, and {there.what} has {_gib(there.size)}"


def summary(config: RunConfig, *, here: bool) -> str:
    """One line: the fullest rank's memory, and the available memory if known. here: as for `room`."""
    there = room(config, here=here)
    known = "" if there is None else f"; {there.what} has {_gib(there.size)}"
    return f"the fullest rank needs about {_gib(memory.estimate(config).rank)}{known}"


def table(need: Estimate) -> list[str]:
    """Return the estimate for people: a line a part, then a rank, and the node where its ranks share the memory."""
    rows = [*need.parts.items(), ("a rank", need.rank)]
    if need.shared:
        rows += [
            ("Python and Megatron-Bridge, once", need.shared),
            (f"a node, {plural(need.ranks, 'rank')}", need.node),
        ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {_aligned(size)}" for name, size in rows]
    return [*lines, *(f"{key}: not followed in {', '.join(parts)}" for key, parts in need.unfollowed.items())]


def as_dict(need: Estimate) -> dict[str, object]:
    """Return the estimate for machines, in bytes."""
    return {
        "parts": dict(need.parts),
        "rank": need.rank,
        "ranks_per_node": need.ranks,
        "node": need.node,
        "not_followed": {key: list(parts) for key, parts in need.unfollowed.items()},
    }


def _aligned(size: int) -> str:
    return f"{size / GIB:8.2f} GiB" if size >= GIB / 10 else f"{size / MIB:8.2f} MiB"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
