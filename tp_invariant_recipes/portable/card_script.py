"""`tpi conformance --script`: a file for machines without this project, and what it writes.

card_script.py.txt is that file, but for the operands: a corner of some recorded cases that tell the known sums apart.
Its JSON names the GPU and holds operands and outputs of every way to multiply that the machine had.
"""

import base64
import binascii
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tp_invariant_recipes import __version__
from tp_invariant_recipes.kernels.products.quantized import Quantized
from tp_invariant_recipes.portable import conformance

TEMPLATE = Path(__file__).with_name("card_script.py.txt")
FORMAT = "tpi conformance 1"
CASES = (
    *("bf16/64_cancel", "bf16/sub_out_cancel"),
    *("e4m3_e4m3_tensor/odd_k160", "e5m2_e4m3_tensor/tensor_k64_e5m2_18"),
)
CORNER = 8  # rows and columns of a case: no output depends on the others
WIDTH = 150  # characters of a line of operands
LARGEST = 2**20  # bytes of a case's operands


def render(name: str) -> str:
    """Return the text of the script, which calls itself `name`."""
    known = {case.name: case for case in conformance.built_in().cases}
    lines = ["{"]
    for case in CASES:
        *sizes, data = _corner(known[case])
        lines.append(f"    {case!r}: ({', '.join(map(str, sizes))}, (")
        text = base64.b85encode(zlib.compress(data, 9)).decode()
        lines += [f"        {text[at : at + WIDTH]!r}" for at in range(0, len(text), WIDTH)]
        lines.append("    )),")
    text = TEMPLATE.read_text()
    for word, value in (("{NAME}", name), ("{VERSION}", __version__), ("{CASES}", "\n".join([*lines, "}"]))):
        text = text.replace(word, value)
    return text


def tensors(report: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """Return the script's JSON as tensors KIND/CASE (WAY)/PART of a recording.

    raises ValueError, KeyError: it is not what the script writes.
    """
    if report.get("format") != FORMAT:
        raise ValueError(f"its format is {report.get('format')!r}, not {FORMAT!r}")
    return dict(_tensors(report["cases"], report["results"]))


def _tensors(cases: dict[str, Any], results: dict[str, Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    for case, ways in results.items():
        m, k, n, text = cases[case]
        sizes = (m, k, n)
        if any(type(size) is not int or not 0 < size < LARGEST for size in sizes) or (m + n) * k > LARGEST:
            raise ValueError(f"case {case!r} has sizes {sizes}")
        word = np.dtype("<u2") if case.startswith("bf16/") else np.dtype("u1")
        shape = (k, n) if case.startswith("bf16/") else (n, k)
        try:
            data = zlib.decompressobj().decompress(base64.b85decode(text), 2 * LARGEST)
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


def _corner(case: conformance.Case) -> tuple[int, int, int, bytes]:
    """Sizes m, k, n, and the bytes of the operands' corner."""
    if isinstance(case.a, Quantized) and isinstance(case.b, Quantized):
        a, b = (x.data[:CORNER].contiguous().view(torch.uint8) for x in (case.a, case.b))
        return len(a), a.shape[1], len(b), a.numpy().tobytes() + b.numpy().tobytes()
    a, b = case.a[:CORNER], case.b[:, :CORNER]  # type: ignore[index]
    words = b"".join(x.contiguous().view(torch.int16).numpy().tobytes() for x in (a, b))
    return len(a), a.shape[1], b.shape[1], words
