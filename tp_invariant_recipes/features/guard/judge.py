# SPDX-License-Identifier: Apache-2.0
"""From what nets have copied to findings.

A thread compares while the run goes on. A case waits for the GPU's work that was launched before it was submitted, on
whatever stream: Bridge trains with `cuda_graph=te` on a stream of its own, and the thread's copies to the host know
only theirs.

Cases of a step are decided once the next step's passes are launched. Until then the rank's own thread launches the
optimizer and the passes, and would wait for Python's lock, up to sys.getswitchinterval() each time.
"""

import os
import platform
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tp_invariant_recipes.ledger import evidence
from tp_invariant_recipes.ledger.evidence import Suspect
from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.machine.processor import cpu_info
from tp_invariant_recipes.numerics.gemm import sampling
from tp_invariant_recipes.numerics.gemm.judge import UnlikeBits, difference, expected
from tp_invariant_recipes.numerics.gemm.sampling import DEFINED, REPEATED, Sample, Sampler
from tp_invariant_recipes.observe.shards import Shards


class Order(NamedTuple):
    """Which of several findings is told. suspects: how many. detector: its number in evidence.DETECTORS."""

    suspects: int
    step: int
    detector: int


@dataclass(frozen=True)
class SilentDataCorruption:
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

    @property
    def order(self) -> Order:
        """The finding with the fewest suspects comes first; of these the earliest step's, then the most specific."""
        return Order(len(self.ranks), self.step, evidence.DETECTORS.index(self.detector))


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
    return cpu_info().get("model name", platform.machine())


def machine() -> dict[str, str]:
    """Return what decides a library's bits on a CPU."""
    return {"processor": processor(), "torch": torch.__version__, "threads": str(torch.get_num_threads())}


Case = Callable[[], SilentDataCorruption | None]


class Judge:
    """Decides cases in their order. count: of the decided ones. findings: of these."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "guard")
        self._of_step: list[tuple[Case, Any]] = []
        self._begun: list[Future[SilentDataCorruption | None]] = []
        self.findings: list[SilentDataCorruption] = []
        self.count = 0

    def submit(self, case: Case, stream: Any = None) -> None:
        """Have a case decided after the next `begin`. stream: whose work it may read; None: the current one."""
        self._of_step.append((case, launched(stream)))

    def begin(self) -> None:
        """Have the thread decide all cases that were submitted."""
        self._begun += [self._executor.submit(_decided, case, launched) for case, launched in self._of_step]
        self._of_step = []

    def decided(self) -> list[SilentDataCorruption]:
        """Wait for the cases that the thread has begun, and return all findings. Raises what a case has raised."""
        decided = [case.result() for case in self._begun]
        self.count += len(decided)
        self.findings += [finding for finding in decided if finding is not None]
        self._begun = []
        return self.findings

    def wait(self) -> list[SilentDataCorruption]:
        """Have all submitted cases decided, and return what `decided` does."""
        self.begin()
        return self.decided()

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def launched(stream: Any = None) -> Any:
    """Return an event after what the stream was given; None: no GPU is in use."""
    if not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event(blocking=True)
    event.record(stream or torch.cuda.current_stream())
    return event


def _decided(case: Case, launched: Any) -> SilentDataCorruption | None:
    if launched is not None:
        launched.synchronize()
    return case()


JUDGES = {
    DEFINED: "the definition of the GEMM, computed by the host's CPU",
    sampling.LIBRARY: "the same GEMM of the library, recomputed by another thread",
    REPEATED: "the same attention of one shard, launched again",
}


def operation(sample: Sample, shards: Shards) -> str:
    """Return a sample's operation in words, by the weight whose memory an operand or the result lies in."""
    where = sample.where
    if where.layer is not None:
        return f"forward pass of decoder.layers.{where.layer - 1}.self_attention.core_attention"
    which = "forward pass" if where.transposed else "input gradient"
    gradients = ((getattr(part.owner, "main_grad", None), part, "weight gradient", where.out) for part in shards.parts)
    weights = ((part.owner, part, which, where.b) for part in shards.parts)
    for tensor, part, words, address in (*gradients, *weights):
        if tensor is not None and 0 <= address - tensor.data_ptr() < tensor.nbytes:
            return f"{words} of {part.name.removesuffix('.weight')}"
    return f"a product {[*sample.a.shape]} @ {[*sample.b.shape] if sample.b is not None else ''}"


class SampledGemms:
    """Hands samples of a step to the judge."""

    def __init__(self, sampler: Sampler, shards: Shards, judge: Judge, rank: int) -> None:
        self.sampler, self.shards, self.judge, self.rank = sampler, shards, judge, rank
        self._stream: Any = None  # of the copies, on a GPU
        self._copied: Any = None  # the event after which graphs may fill the memory of their samples again

    def restart(self, step: int) -> None:
        """Begin a step."""
        self.sampler.restart(step)
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def hand_over(self, step: int) -> None:
        """Copy what was sampled and have it judged; the host does not wait."""
        samples, self.sampler.samples = [*self.sampler.samples, *self.sampler.fixed], []
        for sample, held in zip(self._on_host(samples), samples, strict=True):
            self.judge.submit(partial(self._judged, sample, step, held), self._stream)

    def _judged(self, sample: Sample, step: int, held: Sample) -> SilentDataCorruption | None:
        """held: on the device: nobody may have its memory before it is copied."""
        recomputed = expected(sample)
        unlike_bits = difference(sample.out, recomputed)
        if unlike_bits is None:
            return None
        return SilentDataCorruption(
            evidence.ATTENTION if sample.kind == REPEATED else evidence.PRODUCT,
            step,
            operation(sample, self.shards),
            (self.rank,),
            unlike_bits,
            JUDGES[sample.kind],
            sample.tensors,
            {
                "kind": sample.kind,
                "shards": sample.shards,
                "segments": list(sample.segments),
                "chained": sample.chained,
            },
            portable=sample.kind == DEFINED,
        )

    def _on_host(self, samples: list[Sample]) -> list[Sample]:
        if not any(sample.out.is_cuda for sample in samples):
            return samples
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            moved = [sample.mapped(pinned) for sample in samples]
            self._copied = self._stream.record_event()
        return moved


def pinned(tensor: Tensor) -> Tensor:
    """Return a copy in pinned memory, which is complete once the current stream is."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host
