# SPDX-License-Identifier: Apache-2.0
"""Column- and row-parallel layers with their biases, in every format of operands."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tests.distributed.ranks import FIRST, Split, sliced
from tp_invariant_recipes.kernels.gemm.quantize import E5M2
from tp_invariant_recipes.numerics.layers import linear
from tp_invariant_recipes.numerics.layers.bias import column_bias, row_bias
from tp_invariant_recipes.numerics.layers.formats import plain
from tp_invariant_recipes.numerics.layers.formats.fp8 import Fp8, Mxfp8
from tp_invariant_recipes.numerics.layers.formats.plain import GATHERED
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

Held = dict[str, tuple[Tensor, Split]]  # of a rank, as `together` takes it
SHARDS, DEGREES = 4, (1, 2, 4)
NAMES = ("output", "input gradient", "weight gradient", "bias gradient")
K, N = 128, SHARDS * 128
ALONE = VirtualMesh(SHARDS, 1, 0)


class Format(NamedTuple):
    """The operands on the ranks of a mesh, and their number of tokens."""

    operands: Callable[[VirtualMesh], object]
    dtype: torch.dtype = torch.bfloat16
    tokens: int = 32


FORMATS = {
    "tree": Format(lambda mesh: plain.PLAIN),
    "tree, fp32": Format(lambda mesh: plain.PLAIN, torch.float32),
    "gather": Format(lambda mesh: GATHERED),
    "gather, fp32": Format(lambda mesh: GATHERED, torch.float32),
    "fp8": Format(lambda mesh: Fp8(False, E5M2, mesh.group), tokens=128),
    "fp8 in blocks": Format(lambda mesh: Fp8(True, E5M2, mesh.group), tokens=128),
    "mxfp8": Format(lambda mesh: Mxfp8(plain.LIBRARY, E5M2), tokens=64),  # a rank of four has half a block
}


class Layer(NamedTuple):
    """column, or else row: its input is the other's output. main_grad: added to Megatron's buffers."""

    column: bool
    segments: int = 1
    sequence_parallel: bool = False
    main_grad: bool = True


def tensors(form: Format, layer: Layer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias, dy of many magnitudes. Shards of features differ: a rank alone would choose another scale."""
    generator = torch.Generator().manual_seed(3)
    few, many = K, N * layer.segments

    def wide(rows: int, columns: int) -> Tensor:
        grow = torch.exp2(torch.randint(-9, 9, (rows, columns), generator=generator))
        return torch.randn(rows, columns, generator=generator) * grow

    grow = torch.exp2(torch.arange(SHARDS).repeat_interleave(N // SHARDS).float()).repeat(layer.segments)
    x, dy = wide(form.tokens, few)[:, None], (wide(form.tokens, many) * grow)[:, None]
    weight = wide(many, few) * grow[:, None]
    if not layer.column:
        x, weight, dy = dy, weight.t().contiguous(), x
    bias = torch.randn(weight.shape[0], generator=generator)
    return x.to(form.dtype), weight.to(form.dtype), bias.to(form.dtype), dy.to(form.dtype)


def run(mesh: VirtualMesh, name: str, layer: Layer, operands: object = None) -> Held:
    """`trained` in this format."""
    form = FORMATS[name]
    return trained(mesh, layer, tensors(form, layer), operands or form.operands(mesh))


def trained(mesh: VirtualMesh, layer: Layer, values: tuple[Tensor, ...], operands: object) -> Held:
    """A rank's output, and its gradients of input, weight and bias. values: the whole x, weight, bias, dy."""
    x, weight, bias, dy = values
    column, segments, slices, main_grad = layer
    if column:
        x = x.chunk(mesh.size)[mesh.rank] if slices else x
        weight, bias, dy = (sliced(part, dim, mesh, segments) for part, dim in ((weight, 0), (bias, 0), (dy, 2)))
    else:
        x, weight = sliced(x, 2, mesh), sliced(weight, 1, mesh)
        dy = dy.chunk(mesh.size)[mesh.rank] if slices else dy
    x, weight, bias = (leaf.clone().requires_grad_() for leaf in (x, weight, bias))
    if main_grad:
        weight.main_grad, bias.main_grad = torch.ones(weight.shape), torch.zeros(bias.shape)
    if column:
        y = column_bias(linear.column_parallel(x, weight, mesh, segments, slices, operands), bias)
    else:
        y = row_bias(linear.row_parallel(x, weight, mesh, slices, operands), bias, mesh, slices)
    y.backward(dy)
    dw, db = (leaf.main_grad if main_grad else leaf.grad for leaf in (weight, bias))
    along = 0 if slices else None
    if not column:
        of_bias = FIRST if slices else None  # Megatron adds the gradients of a bias up: one rank has the sum
        return dict(zip(NAMES, ((y.detach(), along), (x.grad, 2), (dw, 1), (db, of_bias)), strict=True))
    of_rows, of_y = ((dim, [part.shape[dim] // segments] * segments) for part, dim in ((weight, 0), (y, 2)))
    return dict(zip(NAMES, ((y.detach(), of_y), (x.grad, along), (dw, of_rows), (db, of_rows)), strict=True))
