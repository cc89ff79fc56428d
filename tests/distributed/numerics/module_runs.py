"""A module of Megatron-Core trained for a micro-batch or two on every rank, and what the ranks hold put together."""

import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.distributed.ranks import joined, megatron, on_ranks, same_bits
from tp_invariant_recipes.numerics.init import place
from tp_invariant_recipes.numerics.mesh import VirtualMesh

# The dimension that is split over the ranks, and the sizes of its local segments; None for what is whole on a rank.
Split = tuple[int, list[int]] | None
Parameters = dict[str, tuple[torch.nn.Parameter, Split]]
DTYPES = (torch.float32, torch.bfloat16)


def split_of(parameter: Any, segments: int = 1) -> Split:
    """As Megatron has marked the parameter."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    dim = parameter.partition_dim
    return dim, list(getattr(parameter, "partition_sizes", [parameter.shape[dim] // segments] * segments))


def set_weights(parameters: Parameters, mesh: VirtualMesh, scale: float) -> None:
    """This rank's part of whole tensors that depend on nothing but their names. scale: of matrices."""
    for name, (parameter, split) in parameters.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        dim, sizes = split or (0, [parameter.shape[0]])
        shape, ranges = place(parameter.shape, dim, *((mesh.rank, mesh.size) if split else (0, 1)), sizes)
        part = torch.randn(shape, generator=generator) * (scale if parameter.ndim > 1 else 1.0)
        for at, pieces in enumerate(ranges):
            part = torch.cat([part.narrow(at, start, stop - start) for start, stop in pieces], at)
        parameter.data.copy_(part)


def run(
    module: torch.nn.Module,
    parameters: Parameters,
    mesh: VirtualMesh,
    shape: Sequence[int],
    forward: Callable[[Any, Tensor], Tensor],
    *,
    sequence_parallel: bool,
    main_grad: bool,
) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Split]]]:
    """Output and input gradient of the last micro-batch, and weight gradients of all by name.

    shape: of the input, [s, b, h]. main_grad: two micro-batches into Megatron's fp32 buffers, not one to autograd.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads

    model: Any = module
    if main_grad:
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        model = DistributedDataParallel(module.config, settings, module)
    else:
        model.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    for n in range(2 if main_grad else 1):
        generator = torch.Generator().manual_seed(n)
        whole = [torch.randn(shape, generator=generator).to(module.config.params_dtype) for _ in range(2)]
        x, dy = (value.chunk(mesh.size)[mesh.rank] if sequence_parallel else value for value in whole)
        x = x.clone().requires_grad_()
        y = forward(model, x)
        y.backward(dy)
    if main_grad:
        model.finish_grad_sync()
    _allreduce_non_tensor_model_parallel_grads([model], module.config)
    gradients = {name: (p.main_grad.clone() if main_grad else p.grad, split) for name, (p, split) in parameters.items()}
    return y.detach(), x.grad, gradients


def whole(ranks: Sequence[tuple], sequence_parallel: bool) -> dict[str, Tensor]:
    """What `run` returned on the ranks, put together: name → tensor."""
    ys, dxs, gradients = zip(*ranks, strict=True)
    found = {}
    for name, parts in (("output", ys), ("input gradient", dxs)):
        assert sequence_parallel or all(same_bits(part, parts[0]) for part in parts)
        found[name] = torch.cat(parts) if sequence_parallel else parts[0]
    return found | put_together(gradients)


def put_together(ranks: Sequence[dict[str, tuple[Tensor, Split]]]) -> dict[str, Tensor]:
    """What ranks hold of named tensors → name → the whole. What several hold whole must be the same."""
    found = {}
    for name in sorted(set().union(*ranks)):
        held = [rank[name] for rank in ranks if name in rank]
        (first, split), parts = held[0], [part for part, _ in held]
        assert split or all(same_bits(part, first) for part in parts), name
        found[name] = joined(parts, *split) if split else first
    return found


def cases(size: int) -> list[tuple[bool, torch.dtype, bool, bool]]:
    """(invariant, dtype, sequence_parallel, main_grad) of a dense module on `size` ranks."""
    return [
        (invariant, dtype, sequence_parallel, main_grad)
        for invariant in (True, False)
        for dtype in DTYPES
        for sequence_parallel in ((False, True) if size > 1 else (False,))
        for main_grad in (False, True)
    ]


def on_all_degrees(shards: int, one: Callable[..., tuple]) -> dict[tuple[int, tuple], dict[str, Tensor]]:
    """(degree, case) → the whole tensors. one: called as one(mesh, *case) on every rank, returns what `run` does."""

    def every(mesh: VirtualMesh) -> dict[tuple, tuple]:
        with megatron(mesh):
            return {case: one(mesh, *case) for case in cases(mesh.size)}

    found = {}
    for size in (1, 2, 4):
        ranks = on_ranks(size, shards, every)
        found |= {(size, case): whole([rank[case] for rank in ranks], case[2]) for case in cases(size)}
    return found
