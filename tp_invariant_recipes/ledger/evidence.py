# SPDX-License-Identifier: Apache-2.0
"""The evidence of corrupted values: one file that `tpi check` judges on any machine, without the run (docs/guard.md).

A file of safetensors, with an `Evidence` as its metadata. Neither Megatron nor a GPU is needed to read it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tp_invariant_recipes.errors import LedgerError, reason
from tp_invariant_recipes.files import write_atomically
from tp_invariant_recipes.reading import MIB, Count, Listed, Record, checked, parse_json, read_limited
from tp_invariant_recipes.text import plural

SUFFIX = ".evidence"
LARGEST = 4096 * MIB
_METADATA = "evidence"

# What has found the corrupted values; the most specific first.
DETECTORS = ("product", "attention", "optimizer", "memory", "collectives", "shadow", "replicas")
PRODUCT, ATTENTION, OPTIMIZER, MEMORY, COLLECTIVES, SHADOW, REPLICAS = DETECTORS


@dataclass(frozen=True)
class Suspect(Record):
    """A rank that may have computed corrupted values. device: its processor; uuid, serial: of a GPU, if the driver
    tells."""

    rank: Count
    host: str
    device: str
    uuid: str | None = None
    serial: str | None = None

    def __str__(self) -> str:
        ids = [f"{name} {value}" for name, value in (("UUID", self.uuid), ("serial number", self.serial)) if value]
        return f"rank {self.rank} on {self.host}, {', '.join([self.device, *ids])}"


@dataclass(frozen=True, kw_only=True)
class Evidence(Record):
    """Wrong bits that a guard has found.

    detector: PRODUCT … SHADOW. step: counted from 1. where: the operation, in words.
    suspects: one rank, or all of which one is wrong. judge: what has told them apart, in words; None: nothing has.
    outputs, of_, bits: wrong outputs, of all that were compared, and corrupted values of them.
    trusted:  the last step whose checkpoint is trusted; 0: the start.
    machine:  what must be alike where bits are computed again: versions and the processor; none: any will do.
    details:  what computes it again, beside the tensors.
    """

    schema: Literal[1] = 1
    detector: str
    step: Count
    where: str
    suspects: Listed[Suspect]
    judge: str | None
    outputs: Count
    of_: Count
    bits: Count
    trusted: Count
    numerics: str
    machine: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """Return the findings as lines for people."""
        who = "\n".join(map(str, self.suspects))
        if len(self.suspects) > 1:
            who = f"one of these is wrong:\n{who}"
        wrong = f"{plural(self.bits, 'bit')} of {self.outputs} of {plural(self.of_, 'output')} wrong"
        judge = f"\njudged by {self.judge}" if self.judge else ""
        found = wrong if self.of_ else "digests differ"
        return f"silent data corruption at step {self.step}: {self.where}: {found}\n{who}{judge}"


def write(file: Path, evidence: Evidence, tensors: Mapping[str, Any]) -> None:
    """Write the file, whole or not at all. tensors: of torch, by name, on any device. Raises OSError."""
    from safetensors.torch import save

    file.parent.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_atomically(file, save(held, {_METADATA: json.dumps(evidence.as_json(), allow_nan=False)}))


def read(file: Path) -> tuple[Evidence, dict[str, Any]]:
    """Return the evidence, and torch's tensors by name. Raises LedgerError: this is no evidence, or not whole."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        data = read_limited(file, LARGEST)
        tensors = load(data)
        header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return checked(Evidence, parse_json(header["__metadata__"][_METADATA].encode())), tensors
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise LedgerError(f"{file} is no evidence of a guard: {reason(error)}") from error
