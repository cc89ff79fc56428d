"""Launches through the C function of Triton's launcher have the arguments that Triton itself gives it."""

from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.nvidia.driver import CudaLauncher

from tp_invariant_recipes.kernels import launch
from tp_invariant_recipes.kernels.launch import Kernel

NUMBERS, CONSTANTS, GRID, STREAM = (640, 1e-6), (8, True), (5, 3), 77


@triton.jit
def _kernel(x, y, n, eps, WIDTH, FLAG):
    pass


@pytest.fixture
def compiled(monkeypatch):
    """A compiled kernel whose C function notes its arguments in `seen`; `as_triton` notes Triton's own launches."""
    launcher = CudaLauncher.__new__(CudaLauncher)  # whose constructor compiles for a GPU
    launcher.num_ctas, launcher.launch_cooperative_grid, launcher.launch_pdl = 1, False, True
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.global_scratch_align = launcher.profile_scratch_align = 1
    seen, as_triton = [], []
    launcher.launch = lambda *arguments: seen.append(arguments)
    kernel = SimpleNamespace(run=launcher, function=123, packed_metadata=(4, 1, 256), seen=seen, as_triton=as_triton)

    def run(self, *arguments, grid, warmup, **options):
        as_triton.append((arguments, options))
        kernel.run(*grid, 1, STREAM, kernel.function, kernel.packed_metadata, None, None, None, *arguments)
        return kernel

    monkeypatch.setattr(triton.JITFunction, "run", run)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM)
    return kernel


def addresses(arguments):
    return tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)


@pytest.mark.parametrize("version", (triton.__version__, "3.9.0"))
def test_later_launches_have_the_arguments_of_the_first(compiled, monkeypatch, version):
    monkeypatch.setattr(triton, "__version__", version)
    kernel, x, y = Kernel(_kernel), torch.zeros(64), torch.zeros(64)
    for _ in range(3):
        kernel.launch(GRID, (x, y), NUMBERS, CONSTANTS)
    assert len(compiled.as_triton) == 1
    assert len(compiled.seen) == 3
    first, second, third = compiled.seen
    assert addresses(first) == addresses(second) == addresses(third)
    assert not any(isinstance(a, torch.Tensor) for a in second)


def test_other_kinds_are_compiled_by_triton(compiled):
    kernel, x = Kernel(_kernel), torch.zeros(64)
    aligned, shifted = (x, x), (x[1:], x)
    kernel.launch(GRID, aligned, NUMBERS, CONSTANTS)
    kinds = (
        (shifted, NUMBERS, CONSTANTS, 4),
        (aligned, (launch._FITS, 1.0), CONSTANTS, 4),
        (aligned, NUMBERS, (16, True), 4),
        (aligned, NUMBERS, CONSTANTS, 8),
        ((x.bfloat16(), x), NUMBERS, CONSTANTS, 4),
    )
    for count, (tensors, numbers, constants, warps) in enumerate(kinds, 2):
        kernel.launch(GRID, tensors, numbers, constants, warps)
        assert len(compiled.as_triton) == count
    kernel.launch(GRID, aligned, NUMBERS, CONSTANTS)  # the control: the first kind is still known
    assert len(compiled.as_triton) == len(kinds) + 1


@pytest.mark.parametrize("version, scratch, direct", (("3.6.0", 0, True), ("3.6.0", 16, False), ("3.9.0", 0, False)))
def test_triton_s_launcher_allocates_scratch_memory_and_knows_its_c_function(
    compiled, monkeypatch, version, scratch, direct
):
    monkeypatch.setattr(triton, "__version__", version)
    compiled.run.global_scratch_size = scratch
    assert launch._entry(compiled)[0] is (compiled.run.launch if direct else compiled.run)
