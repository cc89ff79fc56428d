"""A module of Megatron-Core trained for a micro-batch or two on every rank, and what the ranks hold put together."""

import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.ranks import joined, megatron, on_ranks
from tests.operands import same_bits
from tp_invariant_recipes.numerics.megatron.init import place
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

# The dimension that is split over the ranks, and the sizes of its local segments; None for what is whole on a rank.
Split = tuple[int, list[int]] | None
Parameters = dict[str, tuple[torch.nn.Parameter, Split]]
DTYPES = (torch.float32, torch.bfloat16)
# Megatron-Core's own module on one rank, computed in fp64 from weights and inputs of the dtype that a case names.
FP64 = "fp64"


def split_of(parameter: Any, segments: int = 1) -> Split:
    """As Megatron has marked the parameter."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    dim = parameter.partition_dim
    return dim, list(getattr(parameter, "partition_sizes", [parameter.shape[dim] // segments] * segments))


def computed_in(kind: object, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a module of this kind."""
    return torch.float64 if kind == FP64 else dtype


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
    module: torch.nn.Module,
    parameters: Parameters,
    mesh: VirtualMesh,
    shape: Sequence[int],
    forward: Callable[[Any, Tensor], Tensor],
    *,
    dtype: torch.dtype,
    sequence_parallel: bool,
    main_grad: bool,
) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Split]]]:
    """Output and input gradient of the last micro-batch, and weight gradients of all by name.

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
    gradients = {name: (p.main_grad.clone() if main_grad else p.grad, split) for name, (p, split) in parameters.items()}
    return y.detach(), x.grad, gradients


def whole(ranks: Sequence[tuple], sequence_parallel: bool) -> dict[str, Tensor]:
    """What `run` returned on the ranks, put together: name → tensor."""
    ys, dxs, gradients = zip(*ranks, strict=True)
    results = {}
    for name, parts in (("output", ys), ("input gradient", dxs)):
        assert sequence_parallel or all(same_bits(part, parts[0]) for part in parts)
        results[name] = torch.cat(parts) if sequence_parallel else parts[0]
    return results | joined_shards(gradients)


def joined_shards(ranks: Sequence[dict[str, tuple[Tensor, Split]]]) -> dict[str, Tensor]:
    """What ranks hold of named tensors → name → the whole. What several hold whole must be the same."""
    results = {}
    for name in sorted(set().union(*ranks)):
        held = [rank[name] for rank in ranks if name in rank]
        (first, split), parts = held[0], [part for part, _ in held]
        assert split or all(same_bits(part, first) for part in parts), name
        results[name] = joined(parts, *split) if split else first
    return results


def cases(size: int) -> list[tuple[bool | str, torch.dtype, bool, bool]]:
    """(kind, dtype, sequence_parallel, main_grad) of a module on `size` ranks. kind: invariant or not, or FP64."""
    return [
        (kind, dtype, sequence_parallel, main_grad)
        for kind in ((True, False) if size > 1 else (True, False, FP64))
        for dtype in DTYPES
        for sequence_parallel in ((False, True) if size > 1 else (False,))
        for main_grad in (False, True)
    ]


class OnDegrees(dict[tuple[int, tuple], dict[str, Tensor]]):
    """(degree, case) → the whole tensors, of a degree and a value of main_grad that a test asks for.

    one: called as one(mesh, *case) on every rank, returns what `run` does.
    """

    def __init__(self, shards: int, item: Callable[..., tuple]) -> None:
        self.shards, self.layer_run = shards, item

    def __missing__(self, key: tuple[int, tuple]) -> dict[str, Tensor]:
        size, asked = key
        alike = [case for case in cases(size) if case[3] == asked[3]]
        ranks = on_ranks(size, self.shards, self._every, alike)
        self.update({(size, case): whole([rank[case] for rank in ranks], case[2]) for case in alike})
        return self[key]

    def _every(self, mesh: VirtualMesh, alike: Sequence[tuple]) -> dict[tuple, tuple]:
        with megatron(mesh):
            return {case: self.layer_run(mesh, *case) for case in alike}


# Two ranks add in one order only: four are the fewest that show another.
SIZES = (*(pytest.param(2, sp, marks=pytest.mark.release) for sp in (False, True)), (4, False), (4, True))


@pytest.mark.parametrize("size, sequence_parallel", SIZES)
# `make test` has the gradients of training, in Megatron's buffers.
@pytest.mark.parametrize("main_grad", (pytest.param(False, marks=pytest.mark.release), True))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class OnAllDegrees:
    """Tests of a module; a file that has a fixture `results` of `OnDegrees` makes a class of its own of it.

    names: of all tensors. crossing: of those that stock's sums over ranks change.
    """

    names: frozenset[str]
    crossing: frozenset[str]

    def test_one_result_for_all_degrees(self, results, dtype, main_grad, size, sequence_parallel):
        single = results[1, (True, dtype, False, main_grad)]
        other = results[size, (True, dtype, sequence_parallel, main_grad)]
        assert single.keys() == other.keys() == self.names
        assert [name for name in self.names if not same_bits(single[name], other[name])] == []

    def test_stock_layers_have_several(self, results, dtype, main_grad, size, sequence_parallel):
        single = results[1, (False, dtype, False, main_grad)]
        other = results[size, (False, dtype, sequence_parallel, main_grad)]
        assert [name for name in self.crossing if same_bits(single[name], other[name])] == []

    def test_both_compute_the_same_but_for_rounding(self, results, dtype, main_grad, size, sequence_parallel):
        """Ours is as near to fp64 as stock is on one rank, where no sum over ranks is rounded to bf16."""
        exact, stock = (results[1, (kind, dtype, False, main_grad)] for kind in (FP64, False))
        assert exact.keys() == self.names
        assert inaccurate(results[size, (True, dtype, sequence_parallel, main_grad)], stock, exact) == {}


def differing_without(plant: Callable[[], None], layer_run: Callable[..., tuple], shards: int) -> set[str]:
    """The tensors that depend on the degree where `plant` has left an ingredient out on every rank."""

    def trained(mesh: VirtualMesh) -> tuple:
        with megatron(mesh):
            plant()
            return layer_run(mesh, True, torch.float32, mesh.size > 1, True)

    first, second = (whole(on_ranks(size, shards, trained), size > 1) for size in (1, 2))
    return {name for name in first if not same_bits(first[name], second[name])}


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
