"""The evidence of wrong bits: one file that `tpi check` judges on any machine, without the run (docs/guard.md).

A line of JSON, an `Evidence`, then the bytes of its tensors, one after the other. Reading takes neither torch nor
Megatron.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tp_invariant_recipes.errors import LedgerError
from tp_invariant_recipes.files import write_atomically
from tp_invariant_recipes.plural import counted
from tp_invariant_recipes.reading import MIB, Count, Listed, Record, checked, parse_json, read_limited

SUFFIX = ".evidence"
LARGEST = 4096 * MIB
LONGEST_LINE = 16 * MIB
BYTES = {"bfloat16": 2, "float32": 4, "float64": 8, "int64": 8}

# What has found the wrong bits.
PRODUCT, ATTENTION, OPTIMIZER = "product", "attention", "optimizer"
REPLICAS, MEMORY, SHADOW = "replicas", "memory", "shadow"


@dataclass(frozen=True)
class Suspect(Record):
    """A rank that may have computed wrong bits. device: its processor; uuid, serial: of a GPU, if the driver tells."""

    rank: Count
    host: str
    device: str
    uuid: str | None = None
    serial: str | None = None

    def __str__(self) -> str:
        ids = [f"{name} {value}" for name, value in (("UUID", self.uuid), ("serial number", self.serial)) if value]
        return f"rank {self.rank} on {self.host}, {', '.join([self.device, *ids])}"


@dataclass(frozen=True)
class StoredTensor(Record):
    """A tensor of the file."""

    name: str
    dtype: Literal["bfloat16", "float32", "float64", "int64"]
    shape: Listed[Count]

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Evidence(Record):
    """Wrong bits that a guard has found.

    found_by: PRODUCT … SHADOW. step: counted from 1. where: the operation, in words.
    suspects: one rank, or all of which one is wrong. judge: what has told them apart, in words; None: nothing has.
    outputs, of, bits: wrong outputs, of all that were compared, and wrong bits of them.
    trusted:  the last step whose checkpoint is trusted; 0: the start.
    machine:  what must be alike where bits are computed again: versions and the processor; none: any will do.
    details:  what computes it again, beside the tensors.
    """

    schema: Literal[1] = 1
    found_by: str
    step: Count
    where: str
    suspects: Listed[Suspect]
    judge: str | None
    outputs: Count
    of: Count
    bits: Count
    trusted: Count
    numerics: str
    machine: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    tensors: Listed[StoredTensor] = ()

    def text(self) -> str:
        """The findings as lines for people."""
        who = "\n".join(map(str, self.suspects))
        if len(self.suspects) > 1:
            who = f"one of these is wrong:\n{who}"
        wrong = f"{counted(self.bits, 'bit')} of {self.outputs} of {counted(self.of, 'output')} wrong"
        judge = f"\njudged by {self.judge}" if self.judge else ""
        return f"wrong bits at step {self.step}: {self.where}: {wrong if self.of else 'digests differ'}\n{who}{judge}"


def write(file: Path, evidence: Evidence, tensors: list[bytes]) -> None:
    """Write the file, whole or not at all. tensors: the bytes of `evidence.tensors`. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(evidence.as_json(), allow_nan=False).encode()
    write_atomically(file, b"\n".join([line, b"".join(tensors)]))


def read(file: Path) -> tuple[Evidence, dict[str, tuple[StoredTensor, bytes]]]:
    """The evidence, and its tensors by name. Raises LedgerError: this is no evidence, or not whole."""
    try:
        line, _, rest = read_limited(file, LARGEST).partition(b"\n")
        if len(line) > LONGEST_LINE:
            raise ValueError("its first line is too long")
        evidence = checked(Evidence, parse_json(line))
        if sum(tensor.size for tensor in evidence.tensors) != len(rest):
            raise ValueError("it is not whole, or has bytes that nobody describes")
    except (OSError, ValueError) as error:
        raise LedgerError(f"{file} is no evidence of a guard: {error}") from error
    found, start = {}, 0
    for tensor in evidence.tensors:
        found[tensor.name] = tensor, rest[start : start + tensor.size]
        start += tensor.size
    return evidence, found
