"""Sampled products on their way from a device to the judge, and the names of their modules."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.features.guard.judge import Judge, WrongBits
from tp_invariant_recipes.ledger import evidence
from tp_invariant_recipes.numerics.products import sampling
from tp_invariant_recipes.numerics.products.judge import difference, expected
from tp_invariant_recipes.numerics.products.sampling import DEFINED, REPEATED, Sample, Sampler
from tp_invariant_recipes.observe.shards import Shards

JUDGES = {
    DEFINED: "the product's definition, computed by the host's CPU",
    sampling.LIBRARY: "the same product of the library, computed again by another thread",
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


class SampledProducts:
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

    def _judged(self, sample: Sample, step: int, held: Sample) -> WrongBits | None:
        """held: on the device: nobody may have its memory before it is copied."""
        recomputed = expected(sample)
        unlike_bits = difference(sample.out, recomputed)
        if unlike_bits is None:
            return None
        return WrongBits(
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
            moved = [sample.mapped(_pinned) for sample in samples]
            self._copied = self._stream.record_event()
        return moved


def _pinned(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host
