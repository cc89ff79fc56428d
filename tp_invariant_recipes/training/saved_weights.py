# SPDX-License-Identifier: Apache-2.0
"""The weights that a checkpoint of Megatron holds, in the model of this process."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.observe.shards import sharded_tensors

OF_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def metadata(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint says of its tensors, by name."""
    from torch.distributed.checkpoint import FileSystemReader

    return FileSystemReader(checkpoint).read_metadata().state_dict_metadata


def load_weights(chunks: list[Any], checkpoint: Path, prefix: str, part: str = "", *, shared: bool = False) -> None:
    """Load weights, or what a checkpoint keeps of them under names with a prefix. RunError: it lacks one.

    part: of the names of those to load. shared: all experts of a layer have one adapter.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    chunk = chunks[0].module if hasattr(chunks[0], "module") else chunks[0]
    metadata = dist_checkpointing.load_content_metadata(str(checkpoint))
    state = chunk.sharded_state_dict(metadata=metadata).items()
    sharded = {name: value for name, value in state if is_weight(name) and part in name}
    read, copied = _of_first_experts(sharded) if shared else (sharded, {})
    tensors = [value for value in nested_values(read) if isinstance(value, ShardedTensor | ShardedTensorFactory)]
    _put_prefix(tensors, checkpoint, prefix)
    loaded = dist_checkpointing.load({"model": read}, str(checkpoint))["model"]
    loaded |= {name: loaded[first] for name, first in copied.items()}
    incompatible_keys = chunk.load_state_dict(loaded, strict=False)
    missing = [name for name in incompatible_keys.missing_keys if is_weight(name) and part in name]
    if missing:
        raise RunError(f"{checkpoint} holds no weight {missing[0]}")


def _of_first_experts(sharded: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what to read of adapters that a layer's experts share, and the other experts' names -> the first's."""
    first_of = {name: OF_EXPERT.sub(r".local_experts.0.", name) for name in sharded}
    read = {
        name: of_all_experts(value) if OF_EXPERT.search(name) else value
        for name, value in sharded.items()
        if first_of[name] == name
    }
    return read, {name: first for name, first in first_of.items() if name != first}


def of_all_experts(value: Any) -> Any:
    """Return an expert's adapter, a ShardedTensor or a factory, without the dimension of experts: all share it."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    if isinstance(value, ShardedTensor):
        axis = value.prepend_axis_num - 1
        fields = {
            name: (*numbers[:axis], *numbers[axis + 1 :])
            for name in ("global_shape", "global_offset", "axis_fragmentations")
            if (numbers := getattr(value, name)) is not None
        }
        return replace(value, **fields, prepend_axis_num=axis)
    build = value.build_fn
    return replace(value, build_fn=lambda *given: [of_all_experts(shard) for shard in build(*given)])


def _put_prefix(tensors: list[Any], checkpoint: Path, prefix: str) -> None:
    """Give the tensors, or factories of gate and up or of segments, the checkpoint's names. RunError: it lacks one."""
    there = metadata(checkpoint)
    for tensor in tensors:
        tensor.key = f"{prefix}{tensor.key}"
        lacking = next((shard.key for shard in sharded_tensors(tensor) if shard.key not in there), None)
        if lacking is not None:
            kind = "master weight" if prefix else "weight"
            raise RunError(f"{checkpoint} holds no {kind} {lacking.removeprefix(prefix)}")


def is_weight(name: str) -> bool:
    """Whether a name is no state of a layer of Transformer Engine: `_extra_state`, of experts also `_extra_state3`."""
    return not name.rpartition(".")[2].startswith("_extra_state")
