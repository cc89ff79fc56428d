# SPDX-License-Identifier: Apache-2.0
"""Whether a GPU adds as the definition says: recorded operands, and the bits that a GPU gave for them.

`tensor_core_h200.safetensors` holds what an H200 gave, tensors `KIND/CASE/a`, `b` and `c`: KIND is the dtype of the
operands, a and b are their bits, c the bits of the fp32 output. Its metadata name the GPU, torch's version and, for
every case, the kernels that gave exactly these bits (mmasync and mmawg: Triton's tl.dot with 1 and 4 warps, with the
tile of k; fma: the same for fp32 operands; cublas; cublaswide: the corner of a cuBLAS product 32 times as tall and as
wide). `fp8_hopper.safetensors` has products of FP8 that cuBLAS gave on an H200 and an H100; KIND names the types of the
operands and the blocks of b (kernels/gemm/quantize.py), a and b [n, k] are bytes, sa and sb their scales. `write`
makes such a file of another GPU.
"""

import base64
import binascii
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from tp_invariant_recipes import __version__
from tp_invariant_recipes.errors import RunError, reason
from tp_invariant_recipes.files import write_atomically
from tp_invariant_recipes.kernels.gemm.fixed_tile_gemm import fixed_tile_gemm
from tp_invariant_recipes.kernels.gemm.quantize import E4M3, E5M2, Blocks, Quantized
from tp_invariant_recipes.kernels.gemm.segmented_k_gemm import NAN
from tp_invariant_recipes.reading import MIB, parse_json, read_limited

BUILT_IN, FP8 = (Path(__file__).with_name(f"{name}.safetensors") for name in ("tensor_core_h200", "fp8_hopper"))
LIMIT = 64 * MIB
LARGEST = 2**28  # products of numbers in a case: seconds on a CPU
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WORDS = {"bf16": np.uint16, "fp32": np.uint32}
# KIND of FP8 -> the operands' types and the blocks of b; those of a are 1x128, or the tensor too.
TYPES = {"e4m3_e4m3": (E4M3, E4M3), "e5m2_e4m3": (E5M2, E4M3), "e4m3_e5m2": (E4M3, E5M2)}
FP8_KINDS: dict[str, tuple[torch.dtype, torch.dtype, Blocks]] = {
    f"{name}_{blocks}": (*types, blocks) for name, types in TYPES.items() for blocks in get_args(Blocks)
}

Operand = Tensor | Quantized
Product = Callable[[Any, Any], Tensor]

# `tpi conformance --script` writes a file for machines without this project: the template, and a corner of some
# recorded cases that tell the known sums apart. Its JSON names the GPU, and holds operands and outputs of every way.
SCRIPT_TEMPLATE = Path(__file__).with_name("card_script.py.txt")
SCRIPT_FORMAT = "tpi conformance 1"
SCRIPT_CASES = (
    *("bf16/64_cancel", "bf16/sub_out_cancel"),
    *("e4m3_e4m3_tensor/odd_k160", "e5m2_e4m3_tensor/tensor_k64_e5m2_18"),
)
SCRIPT_CORNER = 8  # rows and columns of a case: no output depends on the others
SCRIPT_WIDTH = 150  # characters of a line of operands
SCRIPT_BYTES = 2**20  # bytes of a case's operands


@dataclass(frozen=True)
class Case:
    """name: KIND/CASE; a: [m, k], b: [k, n] bf16 or fp32, in FP8 [n, k]; bits: [m, n] uint32 of fp32. On the CPU."""

    name: str
    a: Operand
    b: Operand
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


def built_in() -> Recording:
    """All that is part of the package."""
    recording = read(BUILT_IN)
    return Recording(recording.gpu, recording.cases + read(FP8).cases)


def read(file: Path = BUILT_IN) -> Recording:
    """Read a recording, or the JSON of its script. RunError: it cannot be read, or is neither."""
    try:
        data = read_limited(file, LIMIT)
        if data[:1] == b"{" and b"\0" not in data[:8]:  # JSON; a safetensors file begins with a length of 8 bytes
            metadata = parse_json(data)
            if metadata.get("format") != SCRIPT_FORMAT:
                raise ValueError(f"its format is {metadata.get('format')!r}, not {SCRIPT_FORMAT!r}")
            tensors = dict(_case_tensors(metadata["cases"], metadata["results"]))
        else:
            tensors = load(data)
            metadata = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
        names = sorted({name.rpartition("/")[0] for name in tensors})
        if not names:
            raise ValueError("it holds no case")
        cases = tuple(_case(name, tensors) for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise RunError(f"{file} is no recording of tpi conformance: {reason(error)}") from error
    return Recording(
        f"{metadata.get('gpu', 'an unknown GPU')} (sm_{metadata.get('capability', '?').replace('.', '')})", cases
    )


def differences(recording: Recording, gemm: Product) -> list[Difference]:
    """Return the cases of which `product`, on operands where a case has them, gives other bits. Every fp32 NaN counts
    as one:
    the units for fp32 keep a NaN's sign and payload, and the definition does not."""
    mismatches = []
    for case in recording.cases:
        computed, recorded = outputs(case, gemm), _canonical_nan(case, case.bits)
        where = np.argwhere(computed != recorded)
        if where.size:
            row, column = map(int, where[0])
            bits = int(recorded[row, column]), int(computed[row, column])
            mismatches.append(Difference(case.name, row, column, *bits, len(where), recorded.size))
    return mismatches


def outputs(case: Case, gemm: Product) -> NDArray[np.uint32]:
    """Bits of the fp32 output of `product` for a case's operands."""
    return _canonical_nan(case, gemm(case.a, case.b).cpu().contiguous().numpy().view(np.uint32))


def by_definition(a: Operand, b: Operand) -> Tensor:
    """Compute a @ b by kernels/gemm/segmented_k_gemm.py, or a @ b^T by kernels/gemm/fp8_tiles.py, on CPUs."""
    from tp_invariant_recipes.kernels.cpu import fp8_cpu, tensor_core_cpu  # load numba

    return fp8_cpu.gemm(a, b) if isinstance(a, Quantized) else tensor_core_cpu.gemm(a, b)  # type: ignore[arg-type]


def on_gpu(index: int) -> Product:
    """Return the fixed-tile GEMM on a GPU, which every other product there must agree with."""

    def gemm(a: Any, b: Any) -> Tensor:
        with torch.cuda.device(index):
            if isinstance(a, Quantized):
                from tp_invariant_recipes.kernels.gemm import fp8_tiles

                a, b = (Quantized(x.data.cuda(), x.scale.cuda(), x.blocks) for x in (a, b))
                out = torch.empty(len(a.data), len(b.data), device=a.data.device)
                fp8_tiles.gemm(a, b, out, False)
                return out
            a, b = a.cuda(), b.cuda()
            return fixed_tile_gemm(a, b, torch.empty(a.shape[0], b.shape[1], device=a.device))

    return gemm


def write(file: Path, recording: Recording, gemm: Product, metadata: dict[str, str]) -> None:
    """Write what `product` gives for a recording's operands.

    metadata: `gpu`, `capability` and `torch`, as `BUILT_IN` has them.
    """
    tensors = {}
    for case in recording.cases:
        for part, operand in (("a", case.a), ("b", case.b)):
            if isinstance(operand, Quantized):
                tensors[f"{case.name}/{part}"] = operand.data.contiguous().view(torch.uint8).numpy()
                tensors[f"{case.name}/s{part}"] = operand.scale.contiguous().numpy()
            else:
                kind = case.name.partition("/")[0]
                word = torch.int16 if kind == "bf16" else torch.int32
                tensors[f"{case.name}/{part}"] = operand.contiguous().view(word).numpy().view(WORDS[kind])
        tensors[f"{case.name}/c"] = outputs(case, gemm)
    write_atomically(file, save(tensors, metadata=metadata))


def _case(name: str, tensors: dict[str, NDArray[Any]]) -> Case:
    kind = name.partition("/")[0]
    fp8 = FP8_KINDS.get(kind)
    if kind not in DTYPES and fp8 is None:
        raise ValueError(f"case {name!r} is of no kind in {', '.join((*DTYPES, *FP8_KINDS))}")
    a, b, c = (tensors[f"{name}/{part}"] for part in "abc")
    n, k = (1, 0) if fp8 is None else (0, 1)  # dimensions of b
    shapes = a.ndim == b.ndim == c.ndim == 2 and a.shape[1] == b.shape[k] and c.shape == (a.shape[0], b.shape[n])
    word = WORDS.get(kind, np.uint8)
    if not shapes or a.dtype != word or b.dtype != word or c.dtype != np.uint32:
        raise ValueError(f"case {name!r} has operands {a.dtype} {a.shape}, {b.dtype} {b.shape} for {c.dtype} {c.shape}")
    if a.size * b.shape[n] > LARGEST:
        raise ValueError(f"case {name!r} has {a.size * b.shape[n]} products, more than {LARGEST}")
    if fp8 is None:
        return Case(name, _operand(a, kind), _operand(b, kind), c)
    return Case(name, *_quantized(name, tensors, *fp8), c)


def _quantized(
    name: str, tensors: dict[str, NDArray[Any]], a_type: torch.dtype, b_type: torch.dtype, blocks: Blocks
) -> tuple[Quantized, Quantized]:
    of_a: Blocks = "tensor" if blocks == "tensor" else "1x128"

    def operand(part: str, dtype: torch.dtype, blocks: Blocks) -> Quantized:
        data, scale = (torch.from_numpy(tensors[f"{name}/{kind}{part}"].copy()) for kind in ("", "s"))
        return Quantized(data.view(dtype), scale, blocks)

    try:
        return operand("a", a_type, of_a), operand("b", b_type, blocks)
    except TypeError as error:
        raise ValueError(f"case {name!r}: {error}") from error


def _operand(bits: NDArray[Any], kind: str) -> Tensor:
    signed = bits.view(np.int16 if kind == "bf16" else np.int32).copy()
    return torch.from_numpy(signed).view(DTYPES[kind])


def _canonical_nan(case: Case, bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    if not case.name.startswith("fp32/"):
        return bits  # a tensor core has one NaN
    return np.where(np.isnan(bits.view(np.float32)), np.uint32(NAN), bits)


def render_script(name: str) -> str:
    """Return the text of the script, which calls itself `name`."""
    known = {case.name: case for case in built_in().cases}
    lines = ["{"]
    for case in SCRIPT_CASES:
        *sizes, data = _corner(known[case])
        lines.append(f"    {case!r}: ({', '.join(map(str, sizes))}, (")
        text = base64.b85encode(zlib.compress(data, 9)).decode()
        lines += [f"        {text[at : at + SCRIPT_WIDTH]!r}" for at in range(0, len(text), SCRIPT_WIDTH)]
        lines.append("    )),")
    text = SCRIPT_TEMPLATE.read_text()
    for word, value in (("{NAME}", name), ("{VERSION}", __version__), ("{CASES}", "\n".join([*lines, "}"]))):
        text = text.replace(word, value)
    return text


def _case_tensors(cases: dict[str, Any], results: dict[str, Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    for case, ways in results.items():
        m, k, n, text = cases[case]
        sizes = (m, k, n)
        if any(type(size) is not int or not 0 < size < SCRIPT_BYTES for size in sizes) or (m + n) * k > SCRIPT_BYTES:
            raise ValueError(f"case {case!r} has sizes {sizes}")
        word = np.dtype("<u2") if case.startswith("bf16/") else np.dtype("u1")
        shape = (k, n) if case.startswith("bf16/") else (n, k)
        try:
            data = zlib.decompressobj().decompress(base64.b85decode(text), 2 * SCRIPT_BYTES)
            operands = np.frombuffer(data, word)
            a, b = operands[: m * k].reshape(m, k), operands[m * k :].reshape(shape)
            for way, words in ways.items():
                prefix = f"{case} ({way})"
                yield f"{prefix}/a", a
                yield f"{prefix}/b", b
                yield f"{prefix}/c", np.frombuffer(base64.b64decode(words), "<u4").reshape(m, n)
                if word.itemsize == 1:
                    yield from ((f"{prefix}/s{part}", np.ones(1, np.float32)) for part in "ab")
        except (zlib.error, binascii.Error, AttributeError, TypeError) as error:
            raise ValueError(f"case {case!r}: {error}") from error


def _corner(case: "Case") -> tuple[int, int, int, bytes]:
    """Sizes m, k, n, and the bytes of the operands' corner."""
    if isinstance(case.a, Quantized) and isinstance(case.b, Quantized):
        a, b = (x.data[:SCRIPT_CORNER].contiguous().view(torch.uint8) for x in (case.a, case.b))
        return len(a), a.shape[1], len(b), a.numpy().tobytes() + b.numpy().tobytes()
    a, b = case.a[:SCRIPT_CORNER], case.b[:, :SCRIPT_CORNER]  # type: ignore[index]
    words = b"".join(x.contiguous().view(torch.int16).numpy().tobytes() for x in (a, b))
    return len(a), a.shape[1], b.shape[1], words
