# SPDX-License-Identifier: Apache-2.0
"""Sample completions with a model of Megatron's under numerics=portable, by its own layers and with its own bits.

A completion's tokens, log-probabilities, ranks and digests depend on the weights and its request alone: not on the
layout, the batch, the order of requests, chunks, blocks, preemption or the machine. The log-probabilities are those
that `tpi score` and a training's forward pass compute.
"""

import math
import sys
from collections import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tp_invariant_recipes.check.rollouts import Rolled, uncovered
from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.errors import RunError, refuse
from tp_invariant_recipes.features.inference.rank import loaded_for_inference
from tp_invariant_recipes.features.rollouts import prompts
from tp_invariant_recipes.features.rollouts.decode import CachedPasses, common, drawn, greatest, new_cache, shapes_of
from tp_invariant_recipes.features.rollouts.requests import Completion, Request, check, finish_reason
from tp_invariant_recipes.features.rollouts.schedule import BLOCK, Blocks, SampleState, Schedule
from tp_invariant_recipes.machine import processor
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.observe.union import gathered
from tp_invariant_recipes.portable.delta_net import PortableGatedDeltaNet
from tp_invariant_recipes.portable.ieee.draw import request_key
from tp_invariant_recipes.portable.ieee.math import power_of_two
from tp_invariant_recipes.portable.ieee.rotary import LARGEST_ANGLE
from tp_invariant_recipes.portable.layers import PortableDotProductAttention
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.training import heartbeat
from tp_invariant_recipes.training.heartbeat import Phase

CACHED = PortableDotProductAttention, PortableGatedDeltaNet
SHARE = 0.8  # of the free memory, for the cache at most
SERVED = 1 << 15  # tokens of a sequence that a server's first graphs take
KINDS = None, 0  # limits of draws, of a server's first graphs: all tokens, and top-p


class Engine:
    """Generates completions. Every rank of the model makes an engine and calls the same methods.

    Args:
        model: Megatron's module, or a list of one, wrapped or not. The engine reads its weights in place, and leaves
            it as a training has it.
        sequences: The most sequences that are decoded at once.
        chunk: The most tokens of prompts in one pass.
        block: The tokens of a block of the cache, a power of two.
        tokens: The tokens of the cache, keys and values [layers, tokens, groups/t, d] bf16; None: what the requests
            need, at most what fits into SHARE of the free memory.
        graphs: Whether a GPU decodes in CUDA graphs.
        digests: Whether completions have digests of the whole vocabulary.
        decode: Token ids to text; None: there is no tokenizer.

    Raises:
        TpiError: The model has something that the engine does not cover.
    """

    def __init__(
        self,
        model: Any,
        *,
        sequences: int = 256,
        chunk: int = 16384,
        block: int = BLOCK,
        tokens: int | None = None,
        graphs: bool = True,
        digests: bool = False,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        from megatron.core.utils import unwrap_model

        chunks = model if isinstance(model, list) else [model]
        refuse(_wrong_sizes(sequences=sequences, chunk=chunk, block=block, tokens=block if tokens is None else tokens))
        refuse(uncovered(_rolled([unwrap_model(part) for part in chunks])))
        self.model = unwrap_model(chunks[0])
        self.sequences, self.chunk, self.block, self.tokens = sequences, chunk, block, tokens
        self.graphs, self.digests, self.decode = graphs, digests, decode
        self.preemptions = 0  # of the last `generate`
        self.device = next(self.model.parameters()).device
        self._passes: CachedPasses | None = None
        self._blocks, self._longest = 0, 1  # of the cache; tokens of a sequence that every cache takes
        self._addresses: list[int] = []

    def generate(
        self, requests: abc.Sequence[Request], finished: Callable[[Completion], None] | None = None
    ) -> list[Completion]:
        """Sample all completions: for each request, `num_return_sequences` of up to `max_new_tokens` tokens.

        Args:
            requests: The same on every rank; a data-parallel rank computes a share.
            finished: Called with each completion when it ends, on tensor-parallel rank 0 of the ranks that computed it.

        Returns:
            All completions on every rank, in the order of requests and samples.

        Raises:
            TpiError: Requests cannot be completed, all listed; or a log-probability is no number.
        """
        from megatron.core import parallel_state as state

        most = int(min(LARGEST_ANGLE, self._room() * self.block))
        check(requests, self.model.vocab_size, most, text=self.decode is not None)
        ranks = state.get_data_parallel_world_size()
        mine = _shares(requests, ranks)[state.get_data_parallel_rank()]
        sequences = [
            SampleState(request, sample, request_key(request.sampling.seed, request.id))
            for request in mine
            for sample in range(request.sampling.num_return_sequences)
        ]
        passes = self._prepared(sequences)
        told = finished if state.get_tensor_model_parallel_rank() == 0 else None
        completions = self._run(passes, sequences, told)
        if ranks > 1:
            parts = gathered(completions, state.get_data_parallel_group())
            completions = [completion for part in parts for completion in part]
        order = {request.id: number for number, request in enumerate(requests)}
        return sorted(completions, key=lambda completion: (order[completion.request], completion.sample))

    def refit(self) -> None:
        """Note that the weights have changed. If they have moved, CUDA graphs are captured anew."""
        if self._addresses != _addresses(self.model):
            self.release()

    def release(self) -> None:
        """Give back the memory of the cache and of CUDA graphs; `generate` takes it again.

        Call it before process groups end: NCCL waits for CUDA graphs that have its collectives (pytorch#115388).
        """
        self._passes = None

    def opened(self) -> Schedule:
        """Return an empty schedule over the whole cache, for `serve`. Its graphs are captured."""
        count = self._room()
        self._longest = max(1, min(SERVED, count * self.block))
        passes = self._cache(count, 1)
        with passes.entered():
            passes.capture(self.sequences, KINDS)
        return self._schedule([])

    def serve(self, plan: Schedule, between: Callable[[list[Completion], bool], bool]) -> None:
        """Decode the sequences that join a schedule of `opened`, until `between` returns False.

        between: called on every rank before each pass, to let sequences join and leave, with the completions that ended
            in the pass before, and whether no coupled rank had anything to compute then; False before the first.
        """
        group, count, idle = self.coupled, 0, False
        ended: list[Completion] = []
        with self._cache(self._blocks, 1).entered():
            while between(ended, idle):
                spans = plan.next()
                shared = common(spans, plan.longest, group, self.device)
                idle, ended = not shared.rows, []
                if idle:
                    continue
                count += 1
                heartbeat.sign(Phase.LONG_STEP, count)
                passes = self._cache(self._blocks, shared.tokens)
                drawing = [span.sequence for span in spans if span.draws]
                out = passes(spans, shared)
                for span in spans:
                    plan.computed(span)
                ended = self._ended(plan, [(drawing, out)])

    def _run(
        self,
        passes: CachedPasses,
        sequences: list[SampleState],
        finished: Callable[[Completion], None] | None,
    ) -> list[Completion]:
        # Prefixes are of these weights: the next call shares none of this one's.
        plan = self._schedule(sequences)
        completions: list[Completion] = []
        pending: list[tuple[list[SampleState], torch.Tensor]] = []  # draws of passes over prompts, which do not wait
        group, count = self.coupled, 0
        with passes.entered():
            while True:
                spans = plan.prompts()
                if not spans:
                    for completion in self._ended(plan, pending):
                        completions.append(completion)
                        if finished is not None:
                            finished(completion)
                    pending.clear()
                    spans = plan.next()
                shared = common(spans, plan.longest, group, self.device)
                if not shared.rows:
                    break
                count += 1
                heartbeat.sign(Phase.LONG_STEP, count)
                drawing = [span.sequence for span in spans if span.draws]
                pending.append((drawing, passes(spans, shared)))
                for span in spans:
                    plan.computed(span)
        self.preemptions = plan.preemptions
        return completions

    def _schedule(self, sequences: list[SampleState]) -> Schedule:
        blocks, recurrent = Blocks(self._blocks, self.block), shapes_of(self.model)[1][0] > 0
        return Schedule(sequences, blocks, self.sequences, self.chunk, shares=not recurrent)

    def _ended(self, plan: Schedule, pending: list[tuple[list[SampleState], torch.Tensor]]) -> list[Completion]:
        """Add the tokens that passes have drawn. returns: the completions that end with them."""
        ended = []
        for drawing, out in pending:
            for sequence, (token, log_probability, rank, digest) in zip(drawing, drawn(out, len(drawing)), strict=True):
                if token < 0:
                    place = f"request {sequence.request.id}, sample {sequence.sample}, token {len(sequence.drawn)}"
                    raise RunError(f"{place}: a log-probability is no finite number")
                sequence.drawn.append(token)
                sequence.log_probabilities.append(log_probability)
                sequence.ranks.append(rank)
                sequence.digests += [digest] if self.digests else []
                reason = finish_reason(sequence.drawn, sequence.request.sampling, self.decode)
                if reason is not None:
                    plan.end(sequence)
                    ended.append(sequence.completion(reason))
        return ended

    @property
    def coupled(self) -> Any:
        """Return the ranks that compute every pass together though they have other sequences; None: there are none."""
        from megatron.core import parallel_state as state

        if not self.model.config.num_moe_experts:
            return None
        group = state.get_expert_model_parallel_group()
        return group if group.size() > state.get_tensor_model_parallel_world_size() else None

    def _room(self) -> int:
        """Blocks that the cache may have: one number for all ranks, whose schedules are one."""
        if self.tokens is not None:
            return self.tokens // self.block
        keys, states, _ = map(math.prod, shapes_of(self.model))
        room = max(0, int(SHARE * self._free()) - 4 * states * (self.sequences + 1)) // (4 * keys * self.block)
        smallest = torch.tensor([room], device=self.device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        return int(smallest.item())

    def _free(self) -> int:
        """Bytes of memory that this rank may take, those of a cache that it has included."""
        held = 0
        if self._passes is not None:
            held = 2 * self._passes.cache.keys.nbytes + self._passes.cache.states.nbytes
        if self.device.type != "cuda":
            return held + (processor.available() or sys.maxsize) // dist.get_world_size()
        reserved = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return held + reserved + torch.cuda.mem_get_info(self.device)[0]

    def _prepared(self, sequences: list[SampleState]) -> CachedPasses:
        """Return passes over a cache that these sequences fit; the last call's, if they fit it."""
        lengths = sorted((s.most for s in sequences), reverse=True) or [1]
        blocks = Blocks(0, self.block)
        needed = sum(map(blocks.blocks_for, lengths[: self.sequences]))
        count = self._room() if self.tokens is not None else max(1, min(self._room(), needed))
        group, longest = self.coupled, lengths[0]
        if group is not None:  # whose graphs are captured and replayed together
            count, longest = greatest((count, longest), group, self.device)
        return self._cache(count, longest)

    def _cache(self, count: int, longest: int) -> CachedPasses:
        """Return passes over a cache of at least so many blocks; longest: tokens of a sequence, at most."""
        longest = power_of_two(max(longest, self._longest))  # few sizes occur
        held = self._passes
        if held is not None and self._blocks >= count and held.cache.longest >= longest:
            return held
        self._passes = None  # its memory comes first
        if held is None or self._blocks < count:
            held, self._blocks = None, count
            cache = new_cache(self.model, count, self.block, longest, self.sequences, self.device)
        else:
            cache = replace(held.cache, longest=longest)
        self._passes = CachedPasses(self.model, cache, graphs=self.graphs, digests=self.digests)
        self._addresses = _addresses(self.model)
        return self._passes


def _addresses(model: Any) -> list[int]:
    return [weight.data_ptr() for weight in model.parameters()]


def _wrong_sizes(**sizes: int) -> list[str]:
    listed = [f"{name}={value}: must be at least 1" for name, value in sizes.items() if value < 1]
    block = sizes["block"]
    if block > 0 and block & (block - 1):
        listed.append(f"block={block}: must be a power of two")
    if 0 < sizes["tokens"] < block:
        listed.append(f"tokens={sizes['tokens']}: must be at least a block, {block}")
    return listed


def _rolled(chunks: list[Any]) -> Rolled:
    """Return what check/rollouts.py reads of a module."""
    config, pp = chunks[0].config, max(len(chunks), chunks[0].config.pipeline_model_parallel_size)
    numerics = getattr(config, "invariant_mode", None) or mode.STOCK
    layers = [getattr(layer, "self_attention", layer) for layer in chunks[0].decoder.layers]
    parts = [getattr(layer, "core_attention", layer) for layer in layers]
    kinds = sorted({type(part).__name__ for part in parts if not isinstance(part, CACHED)})
    ahead = getattr(chunks[0], "mtp_process", False)
    return Rolled(numerics, pp, bool(config.fp8), ahead, lambda name: getattr(config, name, None), tuple(kinds))


def _shares(requests: abc.Sequence[Request], ranks: int) -> list[list[Request]]:
    """Return the requests of each data-parallel rank: equal prompts on one, for their shared blocks; else balanced."""
    loads = [0] * ranks
    shares: list[list[Request]] = [[] for _ in range(ranks)]
    homes: dict[tuple[int, ...], int] = {}
    for request in requests:
        home = homes.setdefault(request.tokens, min(range(ranks), key=loads.__getitem__))
        shares[home].append(request)
        loads[home] += request.sampling.num_return_sequences * request.sampling.max_new_tokens + len(request.tokens)
    return shares


@dataclass(frozen=True)
class Generate:
    """What a rank does: complete requests, and write each completion when it ends.

    checkpoint: of a run; None: `config.weights.folder` has the weights. folder: of the files of completions.
    tokenizer:  as of `sequences.tokenizer`; None: there is none. options: of `Engine`.
    """

    config: RunConfig
    checkpoint: Path | None
    requests: Sequence[Request]
    folder: Path
    tokenizer: str | None
    options: Mapping[str, Any]

    def __call__(self, run_dir: RunDir, rank_info: Any) -> None:
        """Raise RunError: a log-probability is no number."""
        from megatron.core import parallel_state as state

        decode = sequences.tokenizer(self.tokenizer).decode if self.tokenizer else None
        with loaded_for_inference(self.config, self.checkpoint) as model:
            writes = state.get_tensor_model_parallel_rank() == 0
            rank = state.get_data_parallel_rank()
            write = prompts.writer(self.folder, rank, self.requests, decode) if writes else None
            Engine(model, decode=decode, **self.options).generate(self.requests, write)
