"""Whether a GPU adds as the definition says: recorded operands, and the bits that a GPU gave for them.

`tensor_core_h200.safetensors` holds what an H200 gave, tensors `KIND/CASE/a`, `b` and `c`: KIND is the dtype of the
operands, a and b are their bits, c the bits of the fp32 output. Its metadata name the GPU, torch's version and, for
every case, the kernels that gave exactly these bits (mmasync and mmawg: Triton's tl.dot with 1 and 4 warps, with the
tile of k; fma: the same for fp32 operands; cublas; cublaswide: the corner of a cuBLAS product 32 times as tall and as
wide). `write` makes such a file of another GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.files import write_atomically
from tp_invariant_recipes.kernels.fixed_tile_product import fixed_tile_product
from tp_invariant_recipes.kernels.tensor_core_sum import NAN
from tp_invariant_recipes.reading import MIB, parse_json, read_limited

BUILT_IN = Path(__file__).with_name("tensor_core_h200.safetensors")
LIMIT = 64 * MIB
LARGEST = 2**28  # products of numbers in a case: seconds on a CPU
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WORDS = {"bf16": np.uint16, "fp32": np.uint32}

Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """name: KIND/CASE; a: [m, k], b: [k, n] bf16 or fp32, on the CPU; bits: [m, n] uint32 of the fp32 output."""

    name: str
    a: Tensor
    b: Tensor
    bits: NDArray[np.uint32]


@dataclass(frozen=True)
class Recording:
    """What a GPU gave. gpu: its name and compute capability, from whoever made the file."""

    gpu: str
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Difference:
    """The first differing output of a case, and how many of its outputs differ."""

    case: str
    row: int
    column: int
    recorded: int
    computed: int
    count: int
    outputs: int

    def __str__(self) -> str:
        return (
            f"{self.case}: {self.count} of {self.outputs} outputs differ, the first at [{self.row}, {self.column}]: "
            f"recorded 0x{self.recorded:08x}, computed 0x{self.computed:08x}"
        )


def read(file: Path = BUILT_IN) -> Recording:
    """Read a recording. RunError: it cannot be read, or is none."""
    try:
        data = read_limited(file, LIMIT)
        tensors = load(data)
        length = int.from_bytes(data[:8], "little")
        said = parse_json(data[8 : 8 + length]).get("__metadata__", {})
        names = sorted({name.rpartition("/")[0] for name in tensors})
        if not names:
            raise ValueError("it holds no case")
        cases = tuple(_case(name, tensors) for name in names)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise RunError(f"{file} is no recording of tpi conformance: {error}") from error
    return Recording(f"{said.get('gpu', 'an unknown GPU')} (sm_{said.get('capability', '?').replace('.', '')})", cases)


def differences(recording: Recording, product: Product) -> list[Difference]:
    """The cases of which `product`, on operands where a case has them, gives other bits. Every fp32 NaN counts as one:
    the units for fp32 keep a NaN's sign and payload, and the definition does not."""
    found = []
    for case in recording.cases:
        computed, recorded = outputs(case, product), _one_nan(case, case.bits)
        where = np.argwhere(computed != recorded)
        if where.size:
            row, column = map(int, where[0])
            bits = int(recorded[row, column]), int(computed[row, column])
            found.append(Difference(case.name, row, column, *bits, len(where), recorded.size))
    return found


def outputs(case: Case, product: Product) -> NDArray[np.uint32]:
    """Bits of the fp32 output of `product` for a case's operands."""
    return _one_nan(case, product(case.a, case.b).cpu().contiguous().numpy().view(np.uint32))


def by_definition(a: Tensor, b: Tensor) -> Tensor:
    """a @ b as kernels/tensor_core_sum.py defines it, on the CPU."""
    from tp_invariant_recipes.kernels import tensor_core_cpu  # loads numba

    return tensor_core_cpu.product(a, b)


def on_gpu(index: int) -> Product:
    """The product of fixed tiles on a GPU, which every other product there must agree with."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        with torch.cuda.device(index):
            a, b = a.cuda(), b.cuda()
            return fixed_tile_product(a, b, torch.empty(a.shape[0], b.shape[1], device=a.device))

    return product


def write(file: Path, recording: Recording, product: Product, metadata: dict[str, str]) -> None:
    """Write what `product` gives for a recording's operands.

    metadata: `gpu`, `capability` and `torch`, as `BUILT_IN` has them.
    """
    tensors = {}
    for case in recording.cases:
        kind = case.name.partition("/")[0]
        for part, operand in (("a", case.a), ("b", case.b)):
            word = torch.int16 if kind == "bf16" else torch.int32
            tensors[f"{case.name}/{part}"] = operand.contiguous().view(word).numpy().view(WORDS[kind])
        tensors[f"{case.name}/c"] = outputs(case, product)
    write_atomically(file, save(tensors, metadata=metadata))


def _case(name: str, tensors: dict[str, NDArray[Any]]) -> Case:
    kind = name.partition("/")[0]
    if kind not in DTYPES:
        raise ValueError(f"case {name!r} is of no kind in {', '.join(DTYPES)}")
    a, b, c = (tensors[f"{name}/{part}"] for part in "abc")
    shapes = a.ndim == b.ndim == c.ndim == 2 and a.shape[1] == b.shape[0] and c.shape == (a.shape[0], b.shape[1])
    if not shapes or a.dtype != WORDS[kind] or b.dtype != WORDS[kind] or c.dtype != np.uint32:
        raise ValueError(f"case {name!r} has operands {a.dtype} {a.shape}, {b.dtype} {b.shape} for {c.dtype} {c.shape}")
    if a.size * b.shape[1] > LARGEST:
        raise ValueError(f"case {name!r} has {a.size * b.shape[1]} products, more than {LARGEST}")
    return Case(name, _operand(a, kind), _operand(b, kind), c)


def _operand(bits: NDArray[Any], kind: str) -> Tensor:
    signed = bits.view(np.int16 if kind == "bf16" else np.int32).copy()
    return torch.from_numpy(signed).view(DTYPES[kind])


def _one_nan(case: Case, bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    if case.name.startswith("bf16/"):
        return bits  # a tensor core has one NaN
    return np.where(np.isnan(bits.view(np.float32)), np.uint32(NAN), bits)
