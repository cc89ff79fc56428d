# SPDX-License-Identifier: Apache-2.0
"""Launch a Triton kernel with little host time: the host, not the GPU, limits small models and short sequences.

Triton's own `kernel[grid](…)` binds and specialises the arguments at every call. `Kernel` looks up the compiled kernel
by a short key of all that the specialisation depends on, and calls the C function of its launcher with addresses. Of a
tensor that function would call `data_ptr`, and ask CUDA whether a GPU can read it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tp_invariant_recipes.errors import RunError


class TablePlace(NamedTuple):
    """Rows `row`, `row + step`, … (`rows` of them) and columns `column` … `column + columns - 1` of the whole."""

    row: int
    step: int
    rows: int
    column: int
    columns: int


class TensorPart(NamedTuple):
    """A part of a table. Its row i is row `row + i · step` of the whole, its column j is column `column + j`.

    values: [rows, columns], columns adjacent in memory; a view of a weight, a gradient or what the optimizer keeps.
    copy:   the same values rounded, if they are fp32: bf16 [rows, columns], columns adjacent in memory.
    name:   of the tensor in the whole model (ledger/digests.py says which names); "" where one tensor is meant.
    shape:  of the whole tensor.
    """

    values: Tensor
    row: int
    column: int
    step: int = 1
    copy: Tensor | None = None
    name: str = ""
    shape: tuple[int, ...] = ()

    @property
    def place(self) -> TablePlace:
        """Its place in the whole."""
        return TablePlace(self.row, self.step, self.values.shape[0], self.column, self.values.shape[1])


_FITS = 2**31
C_ENTRY = ("3.6.",)  # versions of Triton whose launcher's C function is known; others are called as Triton does
ALONG_Y = 65535  # CUDA starts as many programs along y; along x 2^31 - 1, so what grows with tokens is counted there


class Kernel:
    """A Triton kernel whose arguments are tensors, then numbers, then tl.constexpr.

    Numbers must be `do_not_specialize`: one binary serves all their values. `options` are Triton's of a compilation.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self.kernel, self.options = kernel, options
        self._compiled: dict[tuple[Any, ...], tuple[Callable[..., object], tuple[Any, ...]]] = {}

    def launch(
        self,
        grid: tuple[int, int],
        tensors: tuple[Tensor, ...],
        numbers: tuple[float, ...],
        constants: tuple[Any, ...],
        num_warps: int = 4,
        num_stages: int = 3,
    ) -> None:
        """`kernel[grid](*tensors, *numbers, *constants)` on the current stream; the defaults are Triton's.

        raises RunError: more than ALONG_Y programs along y.
        """
        if grid[1] > ALONG_Y:
            raise RunError(
                f"{self.kernel.__name__}: {grid[1]} programs along y, of {ALONG_Y} that CUDA starts: too many heads, "
                "samples or shards at once; a smaller train.micro_batch_size"
            )
        device = tensors[0].get_device()
        key = (constants, num_warps, num_stages, device, *[tensor.dtype for tensor in tensors])
        compiled = self._compiled.get(key)
        aligned, addresses = 0, [tensor.data_ptr() for tensor in tensors]
        for address in addresses:
            aligned |= address
        if compiled is None or aligned % 16 or max(numbers, default=0) >= _FITS:
            arguments = (*tensors, *numbers, *constants)
            if not isinstance(self.kernel, triton.JITFunction):  # Triton's interpreter
                self.kernel[grid](*arguments)
                return
            made = self.kernel[grid](*arguments, **self.options, num_warps=num_warps, num_stages=num_stages)
            if not aligned % 16 and all(n < _FITS for n in arguments if isinstance(n, int)):
                self._compiled[key] = _entry(made)
            return
        entry, fixed = compiled
        stream = torch._C._cuda_getCurrentRawStream(device)
        entry(*grid, 1, stream, *fixed, *addresses, *numbers, *constants)


def alignment(size: int) -> int:
    """Return the power of two, at most 16, that a size is a multiple of: what a kernel may be told of rows of this
    size.
    """
    return min(16, size & -size)


def _entry(compiled: Any) -> tuple[Callable[..., object], tuple[Any, ...]]:
    """Return what launches a compiled kernel, and what stands between the stream and the arguments.

    That is the kernel, whether its programs cooperate, whether a launch may begin before the one ahead ends, two
    addresses of scratch memory, metadata, and none of Triton's hooks (CudaLauncher of triton.backends.nvidia.driver).
    """
    launcher, metadata = compiled.run, (compiled.packed_metadata, None, None, None)
    scratch = launcher.global_scratch_size or launcher.profile_scratch_size
    if scratch or not triton.__version__.startswith(C_ENTRY):
        return launcher, (compiled.function, *metadata)
    how = launcher.launch_cooperative_grid, launcher.launch_pdl
    return launcher.launch, (compiled.function, *how, None, None, *metadata)
