# SPDX-License-Identifier: Apache-2.0
"""A module of Megatron-Core trained for a micro-batch or two on every rank, and what the ranks hold put together."""

import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.distributed.ranks import Split
from tp_invariant_recipes.numerics.megatron.init import place
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

Parameters = dict[str, tuple[torch.nn.Parameter, Split]]


def split_of(parameter: Any, segments: int = 1) -> Split:
    """As Megatron has marked the parameter."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    dim = parameter.partition_dim
    return dim, list(getattr(parameter, "partition_sizes", [parameter.shape[dim] // segments] * segments))


def set_weights(parameters: Parameters, mesh: VirtualMesh, scale: float, dtype: torch.dtype) -> None:
    """This rank's part of whole tensors that depend on nothing but their names. scale: of matrices. dtype: of all."""
    for name, (parameter, split) in parameters.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        dim, sizes = split or (0, [parameter.shape[0]])
        shape, ranges = place(parameter.shape, dim, *((mesh.rank, mesh.size) if split else (0, 1)), sizes)
        part = torch.randn(shape, generator=generator) * (scale if parameter.ndim > 1 else 1.0)
        for at, pieces in enumerate(ranges):
            part = torch.cat([part.narrow(at, start, stop - start) for start, stop in pieces], at)
        parameter.data.copy_(part.to(dtype))


def run(
    module: torch.nn.Module, parameters: Parameters, mesh: VirtualMesh, shape: Sequence[int],
    forward: Callable[[Any, Tensor], Tensor], *, dtype: torch.dtype, sequence_parallel: bool, main_grad: bool,
) -> dict[str, tuple[Tensor, Split]]:  # fmt: skip
    """Output and input gradient of the last micro-batch, and weight gradients of all, for `together`.

    shape: of the input, [s, b, h]. dtype: of the input's values. main_grad: two micro-batches into Megatron's fp32
    buffers, not one to autograd; where the module computes in fp64, two to autograd.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads

    model: Any = module
    batches = 2 if main_grad else 1
    main_grad = main_grad and module.config.params_dtype != torch.float64
    if main_grad:
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        model = DistributedDataParallel(module.config, settings, module)
    else:
        model.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    for n in range(batches):
        generator = torch.Generator().manual_seed(n)
        whole = [torch.randn(shape, generator=generator).to(dtype).to(module.config.params_dtype) for _ in range(2)]
        x, dy = (value.chunk(mesh.size)[mesh.rank] if sequence_parallel else value for value in whole)
        x = x.clone().requires_grad_()
        y = forward(model, x)
        y.backward(dy)
    if main_grad:
        model.finish_grad_sync()
    _allreduce_non_tensor_model_parallel_grads([model], module.config)
    along = 0 if sequence_parallel else None
    gradients = {name: (p.main_grad.clone() if main_grad else p.grad, split) for name, (p, split) in parameters.items()}
    return {"output": (y.detach(), along), "input gradient": (x.grad, along)} | gradients


def inaccurate(result: dict[str, Tensor], stock: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, tuple]:
    """The tensors that are clearly further from an fp64 reference than stock's are: name → their error, stock's.

    An error is the norm of the difference, as a part of the reference's. Stock's own is that of the dtype's roundings.
    In fp32 the order of sums decides it, which the processor's instructions choose: under four sets of them
    either had errors of 4e-7 to 3.5e-6, up to 2.6 times the other's. An operand rounded to TF32 has 2**-12.
    """
    errors = {name: [_error(tensors[name], exact[name]) for tensors in (result, stock)] for name in exact}
    return {name: (actual, its) for name, (actual, its) in errors.items() if not actual <= 1.25 * its + 2.0**-18}


def _error(result: Tensor, exact: Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm()).item()
