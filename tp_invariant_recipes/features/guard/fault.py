"""From wrong bits to the message that ends a run, and the files that it leaves (runs/guard_files.py)."""

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.errors import HardwareFault
from tp_invariant_recipes.ledger import evidence
from tp_invariant_recipes.ledger.evidence import Evidence, Suspect
from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.numerics.products.judge import UnlikeBits
from tp_invariant_recipes.numerics.settings import NumericsSettings
from tp_invariant_recipes.runs import checkpoints, guard_files
from tp_invariant_recipes.runs.run_dir import RunDir


@dataclass(frozen=True)
class WrongBits:
    """Wrong bits. detector … details: as of `Evidence`; ranks: the suspects.

    difference: of outputs; None: digests differ. portable: whether any machine can compute it again.
    """

    detector: str
    step: int
    where: str
    ranks: tuple[int, ...]
    difference: UnlikeBits | None = None
    judge: str | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    portable: bool = False


def described(rank: int) -> Suspect:
    """Return this rank."""
    host = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    if not torch.cuda.is_initialized():
        return Suspect(rank, host, f"a CPU ({processor()})")
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    uuid = str(getattr(device, "uuid", "")) or None
    uuid = uuid if uuid is None or uuid.startswith("GPU-") else f"GPU-{uuid}"
    return Suspect(rank, host, device.name, uuid, gpus.serial(uuid))


def processor() -> str:
    """Return the name of this machine's processor."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as stream:
        names = [line.partition(":")[2].strip() for line in stream if line.startswith("model name")]
        return next(iter(names), platform.machine())
    return platform.machine()


def machine() -> dict[str, str]:
    """Return what decides a library's bits on a CPU."""
    return {"processor": processor(), "torch": torch.__version__, "threads": str(torch.get_num_threads())}


class Reporter:
    """Writes what this rank has found. everyone: all ranks."""

    def __init__(self, run_dir: RunDir, rank: int, everyone: list[Suspect], numerics: NumericsSettings) -> None:
        self.run_dir, self.rank, self.everyone, self.numerics = run_dir, rank, everyone, numerics

    def report(self, finding: WrongBits, trusted: int) -> HardwareFault:
        """Return the error to raise. Its files are written."""
        unlike = finding.difference or UnlikeBits(0, 0, 0)
        file = guard_files.evidence_file(self.run_dir, finding.step, self.rank)
        written = Evidence(
            detector=finding.detector,
            step=finding.step,
            where=finding.where,
            suspects=tuple(self.everyone[rank] for rank in finding.ranks),
            judge=finding.judge,
            outputs=unlike.outputs,
            of_=unlike.elements,
            bits=unlike.bits,
            trusted=trusted,
            numerics=self.numerics.mode,
            machine={} if finding.portable else machine(),
            details=dict(finding.details),
        )
        evidence.write(file, written, finding.tensors)
        hosts = tuple(sorted({suspect.host for suspect in written.suspects}))
        guard_files.distrust(self.run_dir, self.rank, guard_files.Untrusted(trusted, hosts))
        return HardwareFault(f"{written.text()}\n{self._checkpoints(trusted)}\nevidence: tpi check {file}")

    def _checkpoints(self, trusted: int) -> str:
        steps = [checkpoint.step for checkpoint in checkpoints.finished(self.run_dir.checkpoints)]
        last = max((step for step in steps if step <= trusted), default=None)
        if last is None:
            return "no checkpoint is trusted: the run begins again from its start"
        return f"the last trusted checkpoint is of step {last}; tpi train --resume {self.run_dir.path} goes on from it"
