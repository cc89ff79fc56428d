# SPDX-License-Identifier: Apache-2.0
"""Run a function on t Gloo ranks, each a fork of this process, and collect what each returns."""

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # what backward(gradient) imports, here once and not in every rank

from tests.operands import same_bits
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh


def on_ranks(size: int, shards: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(mesh, *arguments)` on `size` ranks with V = `shards`; what the ranks returned, in rank order.

    Results are pickled, so they may hold tensors. An exception on any rank is raised here.
    """
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                _rank(Path(folder), rank, size, shards, function, arguments)
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        results = [pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(size)]
    failed = [result for result in results if isinstance(result, BaseException)]
    if failed:
        raise failed[0] if len(failed) == 1 else RuntimeError("\n".join(map(str, failed)))
    return results


def _rank(folder: Path, rank: int, size: int, shards: int, function: Callable[..., Any], arguments: tuple) -> None:
    try:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
        group = dist.group.WORLD if size > 1 else None
        result = function(VirtualMesh(shards, size, rank, group), *arguments)
        dist.barrier()
    except BaseException as error:
        result = RuntimeError(f"rank {rank}: {error!r}\n{traceback.format_exc()}")
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(result))
    os._exit(0)


def terms(*shape: int, seed: int = 0) -> torch.Tensor:
    """[terms, …] fp32 of magnitudes that show the order in which the terms are added."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-12, 12, (shape[0], *(1 for _ in shape[1:])), generator=generator)
    return torch.randn(shape, generator=generator) * 2.0**exponents


@contextmanager
def megatron(mesh: VirtualMesh, **degrees: int) -> Iterator[None]:
    """Megatron's process groups over the ranks of `mesh`, on the CPU. Ask for the fixture `bridge` as well.

    degrees: others than tp, such as expert_model_parallel_size.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from tp_invariant_recipes.cpu_host import cpu

    with cpu.installed():
        parallel_state.initialize_model_parallel(**{"tensor_model_parallel_size": mesh.size} | degrees)
        model_parallel_cuda_manual_seed(1)
        yield


def sliced(whole: torch.Tensor, dim: int, mesh: VirtualMesh, segments: int = 1) -> torch.Tensor:
    """This rank's slice of every segment of a tensor, in memory of its own. `joined` is the inverse."""
    parts = [segment.chunk(mesh.size, dim)[mesh.rank] for segment in whole.chunk(segments, dim)]
    return torch.cat(parts, dim).contiguous()


def joined(parts: Sequence[torch.Tensor], dim: int, segments: int | list[int] = 1) -> torch.Tensor:
    """The whole of a tensor in segments, of each of which every rank has its slice along `dim`.

    segments: how many equal ones, or the sizes of a rank's slices.
    """
    split = [part.chunk(segments, dim) if isinstance(segments, int) else part.split(segments, dim) for part in parts]
    return torch.cat([torch.cat(slices, dim) for slices in zip(*split, strict=True)], dim)


# Where a rank's part of a tensor lies: along a dimension, in segments of these sizes or in one. None: each rank has the
# whole. FIRST: the first rank has it, and the others have zeros, which Megatron adds.
Split = tuple[int, list[int]] | int | str | None
FIRST = "first"


def together(ranks: Sequence[dict[str, tuple[torch.Tensor, Split]]]) -> dict[str, torch.Tensor]:
    """What ranks hold of named tensors → name → the whole. What several hold whole must be the same."""
    results = {}
    for name in sorted(set().union(*ranks)):
        held = [rank[name] for rank in ranks if name in rank]
        (first, split), parts = held[0], [part for part, _ in held]
        if split is None:
            assert all(same_bits(part, first) for part in parts), name
        elif split == FIRST:
            assert not any(part.count_nonzero() for part in parts[1:]), name
        else:
            first = joined(parts, *split) if isinstance(split, tuple) else torch.cat(parts, int(split))
        results[name] = first
    return results


def unequal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """The tensors of which not all bits are equal."""
    assert a.keys() == b.keys()
    return [name for name in a if not same_bits(a[name], b[name])]
