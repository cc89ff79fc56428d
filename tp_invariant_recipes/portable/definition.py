# SPDX-License-Identifier: Apache-2.0
"""numerics=portable: arithmetic that is specified to the last bit, so that every machine that computes it has bitwise
identical ledgers.

`DEFINITION` is the version of all statements together: kernels/gemm/segmented_k_gemm.py (products),
portable/ieee/ (all else), and the orders of sums across shards (numerics/sums/tree.py). Whoever changes one of them
so that a bit changes raises it; ledgers of two versions are not promised to be equal.
"""

import hashlib
import platform
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.portable import conformance
from tp_invariant_recipes.text import abbreviated


def ampere(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b of bf16, [m, k] and [k, n], on the CPU: 24 bits kept, 8 products at once.

    Zeros after every 8 numbers make a step of 16 one of 8, since a product of zeros changes nothing.
    """
    from tp_invariant_recipes.kernels.cpu import tensor_core_cpu  # loads numba

    return tensor_core_cpu.gemm(_spread(a), _spread(b.t()).t(), kept=24)


SUMS: tuple[tuple[str, Callable[[Tensor, Tensor], Tensor]], ...] = (
    ("it keeps 24 bits and adds 8 products at once, as Ampere and Ada GPUs do", ampere),
)


def name(recording: conformance.Recording, gemm: conformance.Product | None) -> str | None:
    """Name the sum that `product` is in all bf16 cases of a recording; None: no row of SUMS.

    product: of a device; None: the recording's own bits are what a device gave.
    """
    cases = [case for case in recording.cases if case.name.startswith("bf16/")]
    if not cases:
        return None
    bits = [case.bits if gemm is None else conformance.outputs(case, gemm) for case in cases]
    for text, other in SUMS:
        if all(
            np.array_equal(conformance.outputs(case, other), given) for case, given in zip(cases, bits, strict=True)
        ):
            return text
    return None


def _spread(x: Tensor) -> Tensor:
    """[m, k] → [m, 2 k], k rounded up to a multiple of 8, with 8 zeros after every 8 numbers."""
    m, k = x.shape
    groups = -(-k // 8)
    out = torch.zeros(m, groups, 16, dtype=x.dtype)
    out[:, :, :8] = torch.nn.functional.pad(x, (0, groups * 8 - k)).view(m, groups, 8)
    return out.view(m, groups * 16)


DEFINITION = 2
# SHA-256 of the bits of exp, log, sigmoid, rsqrt and exp2 for the numbers of `samples`.
FUNCTIONS = "e8d9b89bacc34304be68028b37f6a2946b77072016c9b72920a5edaa1feac45b"
# Of the recorded cases at every start: the longest k, and how many rows of each, which do not depend on the others.
# Tests compare all of them.
LONGEST, ROWS = 4096, 16
NAMED = 2  # differing cases in the message


@cache
def require_conformance(gpu: int | None = None, *, fp8: bool = False) -> None:
    """Compute recorded cases as a run would, once a process and device.

    gpu: index of the GPU that the run computes on; None: the CPU.
    fp8: the run multiplies in FP8, too.
    raises RunError: a bit differs; the message names the device, the cases and the bits.
    """
    different = differences(gpu)
    if different:
        known = name(_bf16_rows(), _product(gpu))
        what = f"{named(gpu)} is not bitwise identical to the definition{f' ({known})' if known else ''}"
        raise RunError(
            f"numerics=portable: {what}, so the run's ledger would hold for such machines only: "
            f"{abbreviated(different, NAMED, '; ')}; or numerics=tree"
        )
    different = fp8_differences(gpu) if fp8 else []
    if different:
        raise RunError(
            f"numerics=portable: {named(gpu)} adds FP8 GEMMs in another order (Blackwell is expected to), so the run's "
            f"ledger would hold for such machines only: {abbreviated(different, NAMED, '; ')}; "
            "precision=bf16 or precision=mxfp8, or numerics=tree"
        )


def differences(gpu: int | None) -> list[str]:
    """List what a device computes in another way: a line a recorded case, with its bits; empty: nothing."""
    lines = _differences(_bf16_rows(), gpu)
    if functions(gpu) != FUNCTIONS:
        lines.append("exp, log, sigmoid, rsqrt or exp2: not bitwise identical to portable/ieee/math.py")
    return lines


def fp8_differences(gpu: int | None) -> list[str]:
    """As `differences`, of the recorded products in FP8."""
    return _differences(conformance.read(conformance.FP8), gpu)


def _bf16_rows() -> conformance.Recording:
    recording = conformance.read()
    cases = tuple(
        replace(case, a=case.a[:ROWS], bits=case.bits[:ROWS])  # type: ignore[index]
        for case in recording.cases
        if case.name.startswith("bf16/") and case.a.shape[1] <= LONGEST  # type: ignore[union-attr]
    )
    return conformance.Recording(recording.gpu, cases)


def _differences(recording: conformance.Recording, gpu: int | None) -> list[str]:
    return [str(difference) for difference in conformance.differences(recording, _product(gpu))]


def _product(gpu: int | None) -> conformance.Product:
    return conformance.by_definition if gpu is None else conformance.on_gpu(gpu)


def named(gpu: int | None) -> str:
    """Return the device in a message."""
    if gpu is None:
        return f"this CPU ({platform.machine()})"
    properties = torch.cuda.get_device_properties(gpu)
    return f"GPU {gpu} ({properties.name}, sm_{properties.major}{properties.minor})"


def functions(gpu: int | None = None) -> str:
    """Return the hash that FUNCTIONS must be."""
    from tp_invariant_recipes.portable.ieee import storage as ieee_samples

    numbers = torch.from_numpy(samples())
    values = ieee_samples.values(numbers if gpu is None else numbers.cuda(gpu)).cpu().numpy()
    return hashlib.sha256(values.tobytes()).hexdigest()


def samples() -> np.ndarray:
    """fp32 numbers of all magnitudes and both signs, subnormal ones, infinities and NaN too."""
    return np.arange(0, 2**32, 2**32 // 509, dtype=np.uint64).astype(np.uint32).view(np.float32)
