# SPDX-License-Identifier: Apache-2.0
"""A pass: rows of tokens through the model, and the draws that follow from its last hidden states.

The model's own layers compute it (portable/cached_pass.py). Rows of numerics=portable are independent of the rows
beside them, so a pass is filled up to a size that occurs often: a CUDA graph has one size, and products are tried once
for each. A graph is captured where a size of single rows occurs for the second time.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tp_invariant_recipes.cpu_host.vectors import VECTORS
from tp_invariant_recipes.features.inference.rank import LEAST, padded
from tp_invariant_recipes.features.rollouts.schedule import SCRATCH, SampleState, Span
from tp_invariant_recipes.kernels.causal_conv import TAPS
from tp_invariant_recipes.kernels.digest import row_digest
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.gemm import sampling
from tp_invariant_recipes.numerics.layers import cross_entropy
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import all_gather
from tp_invariant_recipes.portable.cached_pass import CachedPass, Recurrent, cached
from tp_invariant_recipes.portable.delta_net import PortableGatedDeltaNet
from tp_invariant_recipes.portable.ieee.cached_attention import Spans, rows_of_tile
from tp_invariant_recipes.portable.ieee.draw import draw
from tp_invariant_recipes.portable.ieee.math import power_of_two
from tp_invariant_recipes.replacement import Replacement, applied

# Attributes of Megatron's modules: recomputation reads random states, which no CUDA graph can capture.
OF_TRAINING = ("training", "recompute_input_layernorm", "recompute_pre_mlp_layernorm", "recompute_mlp")
NO_RANDOM_STATES = Replacement(
    "megatron.core.tensor_parallel.random:_CUDA_RNG_STATE_TRACKER.fork",
    lambda _: nullcontext,
    "sequence parallelism sets random states for dropout, of which there is none here; no CUDA graph can capture it",
)
NO_DRAW = 0.0, 1.0, 0.0, 1.0  # numbers of a row that only fills up
Drawn = tuple[int, float, int, int]  # token, log-probability (fp32), rank, digest of the vocabulary's


class Inputs(NamedTuple):
    """What a pass reads.

    rows:    [R, 5] int64: token, position, slot, state, number in the span. tables: as of `Spans`.
    states:  [spans, 4] int32: as of `delta_rule`.
    draws:   [D, 4] int64: the row that predicts, and the draw's keys.
    numbers: [D, 4] fp64: as of `draw`.
    """

    rows: Any
    tables: Any
    states: Any
    draws: Any
    numbers: Any


@dataclass(frozen=True)
class Cache:
    """The keys and values of all layers of attention, [layers, slots, groups/t, d] bf16, in blocks of `size` tokens.

    longest: positions of the longest sequence that it is for. blocks: of a table.
    states, tails: of gated delta nets, as of `Recurrent`: the first for rows that only fill up.
    """

    keys: Tensor
    values: Tensor
    size: int
    longest: int
    states: Tensor
    tails: Tensor

    @property
    def blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.longest // self.size)


class TokenHead:
    """The output layer as a function of some rows of the last hidden states: log-probabilities, and draws from them."""

    def __init__(self, model: Any, *, digests: bool) -> None:
        self.model, self.digests, config = model, digests, model.config
        self.layer = copy.copy(model.output_layer)  # its weights are the model's
        self.layer.config = copy.copy(self.layer.config)
        self.layer.config.sequence_parallel = self.layer.sequence_parallel = False  # it gets rows, and no slices
        group = model.pg_collection.tp
        self.mesh = VirtualMesh.from_group(config.virtual_shards, group)
        self.gathers = config.sequence_parallel and group.size() > 1
        self.kernels = mode.mode_of(config).cross_entropy()
        self.vocabulary = model.vocab_size

    def __call__(self, hidden: Tensor, draws: Tensor, numbers: Tensor, limits: int | None) -> Tensor:
        """hidden: [R/t or R, 1, h]; draws, numbers: of `Inputs`; limits: as of `draw`.

        returns: [D, 4] int64: `Drawn`, fp32 as bits.
        """
        if self.gathers:
            hidden = all_gather(hidden, self.mesh)
        model = self.model
        weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        logits = model._scale_logits(self.layer(hidden[draws[:, 0]], weight=weight)[0]).squeeze(1)
        mine = cross_entropy.log_probabilities(logits, self.mesh, self.kernels)
        whole = mine
        if self.mesh.size > 1:
            whole = all_gather(mine.unsqueeze(0), self.mesh).transpose(0, 1).flatten(1)
        whole = whole[:, : self.vocabulary].contiguous()
        tokens = draw(whole, draws[:, 1:], numbers, limits=limits)
        chosen = tokens.clamp(min=0)
        picked = whole.gather(1, chosen.unsqueeze(1)).squeeze(1)
        ranks = cross_entropy.rank_of(logits, chosen, self.mesh)
        digests = row_digest(whole, 0, self.vocabulary) if self.digests else torch.zeros_like(tokens)
        return torch.stack([tokens, picked.view(torch.int32).long(), ranks, digests], 1)


def capturable(groups: Sequence[Any], device: torch.device) -> bool:
    """Whether a CUDA graph can hold what a pass does; none captures Gloo. groups: whose collectives it runs."""
    return device.type == "cuda" and all(dist.get_backend(group) == dist.Backend.NCCL for group in groups)


class Common(NamedTuple):
    """What ranks that exchange experts' tokens have in common of a pass, the greatest of each; of one rank its own.

    rows: that it computes; 0: none. longest: rows of the longest span. limits: -1 and more: as of `draw`, less one.
    tokens: of the longest sequence, with all that it may become.
    """

    rows: int
    longest: int
    limits: int
    tokens: int


class SingleRows:
    """What a pass of `total` single rows reads, on the host. What a sequence keeps stays while it keeps its row.

    Rows that only fill up are written to the scratch block, and no span has them.
    """

    def __init__(self, total: int, cache: Cache) -> None:
        rows, tables = np.zeros((total, 5), np.int64), np.zeros((total, 2 + cache.blocks), np.int32)
        states, draws, numbers = np.zeros((total, 4), np.int32), np.zeros((total, 4), np.int64), np.zeros((total, 4))
        self.inputs, self.size = Inputs(rows, tables, states, draws, numbers), cache.size
        self._held: list[tuple[SampleState, list[int], int]] = []  # of each row, with its blocks and how many
        self._keys, self._numbers = np.zeros((total, 3), np.int64), np.zeros((total, 4))

    def __call__(self, sequences: Sequence[SampleState]) -> Inputs:
        """Return what a row of each sequence reads."""
        rows, tables, states, draws, numbers = self.inputs
        count, held = len(sequences), self._held
        for n, sequence in enumerate(sequences):
            blocks = sequence.blocks
            if n < len(held) and held[n][0] is sequence and held[n][1] is blocks and held[n][2] == len(blocks):
                continue
            tables[n, : 2 + len(blocks)] = [n, 1, *blocks]
            states[n, :3], rows[n, 3] = (n, 1, sequence.state), sequence.state
            self._keys[n] = sequence.key, sequence.sample, len(sequence.request.tokens)
            self._numbers[n] = sequence.request.sampling.numbers
        for part in (rows, tables, states):
            part[count:] = 0
        self._held = [(sequence, sequence.blocks, len(sequence.blocks)) for sequence in sequences]
        starts = np.array([sequence.computed for sequence in sequences], np.int64)
        rows[:count, 0] = [sequence.token(sequence.computed) for sequence in sequences]
        rows[:count, 1], rows[count:, 2] = starts, SCRATCH * self.size
        rows[:count, 2] = (
            tables[np.arange(count), 2 + starts // self.size].astype(np.int64) * self.size + starts % self.size
        )
        states[:count, 3] = starts == 0
        drawn = np.array([len(sequence.drawn) for sequence in sequences], np.int64)
        at = np.flatnonzero(starts + 1 == self._keys[:count, 2] + drawn)  # a row within a prompt draws nothing
        draws[:], numbers[:] = 0, NO_DRAW
        draws[: len(at)] = np.column_stack((at, self._keys[at, :2], drawn[at]))
        numbers[: len(at)] = self._numbers[at]
        return self.inputs


class CachedPasses:
    """Passes of a model over a cache. model: unwrapped. graphs: whether rows are decoded in CUDA graphs."""

    def __init__(self, model: Any, cache: Cache, *, graphs: bool, digests: bool) -> None:
        self.model, self.cache, self.head = model, cache, TokenHead(model, digests=digests)
        self.device, config = cache.keys.device, model.config
        experts = config.num_moe_experts
        whole = VECTORS // math.gcd(experts, VECTORS) if experts and self.device.type == "cpu" else 1
        self.multiple = config.virtual_shards * whole
        kinds = [isinstance(net, PortableGatedDeltaNet) for net in _mixers(model)]
        self.places = [kinds[:n].count(kind) for n, kind in enumerate(kinds)]
        self.heads = config.num_attention_heads // config.num_query_groups
        groups = (model.pg_collection.tp, *([model.pg_collection.ep] if experts else []))
        self.graphs = graphs and capturable(groups, self.device)
        self._graphs: dict[tuple[int, int | None], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._seen: dict[tuple[int, int | None], Inputs] = {}  # what graphs read
        # One replay follows another, so graphs share the memory between their kernels.
        self._single: dict[int, SingleRows] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.graphs else None

    def __call__(self, spans: Sequence[Span], shared: Common) -> Tensor:
        """Draw a token for each span that predicts one, in order, as `drawn` reads it. No spans: a pass of fillers.

        shared: of these spans. Ranks that exchange experts' tokens capture and replay the same graphs in the same pass.
        """
        inputs = self._inputs(spans, shared)
        # Few sizes occur.
        limits = None if shared.limits < 0 else shared.limits and power_of_two(shared.limits)
        if self.graphs and shared.longest == 1:
            return self._replayed(inputs, limits)
        longest = max((span.count for span in spans), default=1)
        return self._computed(self._on_device(inputs), longest, limits)

    def capture(self, most: int, kinds: Sequence[int | None]) -> None:
        """Capture the graphs of passes of up to `most` single rows now. kinds: limits, as of `draw`."""
        sizes = sorted({self._sized(rows) for rows in range(1, most + 1)}, reverse=True) if self.graphs else ()
        for size, limits in ((size, limits) for size in sizes for limits in kinds):
            for _ in range(2):  # as it is, then into a graph
                self._replayed(self._inputs((), Common(size, 1, -1, 1)), limits)

    def _on_device(self, inputs: Inputs) -> Inputs:
        if self.device.type != "cuda":
            return Inputs(*map(torch.from_numpy, inputs))
        pinned = (torch.from_numpy(x).pin_memory() for x in inputs)  # a copy of other memory waits for the GPU
        return Inputs(*(x.to(self.device, non_blocking=True) for x in pinned))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """In the block the model is no training's: it returns hidden states, recomputes no layer, and has no guard."""
        model = self.model
        before: list[tuple[Any, str, bool]] = [(model, "post_process", model.post_process)]
        before += [(m, name, getattr(m, name)) for m in model.modules() for name in OF_TRAINING if hasattr(m, name)]
        try:
            for module, name, _ in before:
                setattr(module, name, False)
            with torch.no_grad(), sampling.paused(), applied([NO_RANDOM_STATES]):
                yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)

    def _sized(self, rows: int) -> int:
        """Return the rows of a pass, or of its draws, when it is filled up."""
        if rows > LEAST:
            return padded(rows, self.multiple)
        least = max(rows, 1)
        return -(-(1 << (least - 1).bit_length()) // self.multiple) * self.multiple

    def _inputs(self, spans: Sequence[Span], shared: Common) -> Inputs:
        """On the host; of single rows valid until the next pass of as many."""
        if shared.longest == 1:
            total = self._sized(shared.rows)
            if total not in self._single:
                self._single[total] = SingleRows(total, self.cache)
            return self._single[total]([span.sequence for span in spans])
        total, size = self._sized(sum(span.count for span in spans)), self.cache.size
        tile = rows_of_tile(self.heads, 2) if self.device.type == "cuda" else total
        rows, states = np.zeros((total, 5), np.int64), np.zeros((len(spans), 4), np.int32)
        rows[:, 2] = SCRATCH * size
        first = 0
        tables: list[tuple[int, int, list[int]]] = []
        draws: list[tuple[int, int, int, int]] = []
        numbers: list[tuple[float, float, float, float]] = []
        for number, (sequence, count) in enumerate((span.sequence, span.count) for span in spans):
            start, blocks, state = sequence.computed, sequence.blocks, sequence.state
            states[number] = first, count, state, start == 0
            positions = np.arange(start, start + count)
            slots = np.array(blocks)[positions // size] * size + positions % size
            tokens = sequence.tokens(start, start + count)
            rows[first : first + count] = np.stack(
                (tokens, positions, slots, np.full(count, state), positions - start), 1
            )
            tables += [(first + n, min(tile, count - n), blocks) for n in range(0, count, tile)]
            first += count
            if start + count == len(sequence):
                draws.append((first - 1, sequence.key, sequence.sample, len(sequence.drawn)))
                numbers.append(sequence.request.sampling.numbers)
        table = np.zeros((len(tables), 2 + self.cache.blocks), np.int32)
        for n, (at, count, blocks) in enumerate(tables):
            table[n, : 2 + len(blocks)] = [at, count, *blocks]
        filler = (self._sized(len(draws)) if draws else 0) - len(draws)
        draws += [(0, 0, 0, 0)] * filler
        numbers += [NO_DRAW] * filler
        columns = np.array(draws, np.int64), np.array(numbers, np.float64)
        return Inputs(rows, table, states, *(column.reshape(-1, 4) for column in columns))

    def _computed(self, inputs: Inputs, longest: int, limits: int | None) -> Tensor:
        """[D, 4], as of `TokenHead`."""
        rows, cache = inputs.rows, self.cache
        spans = Spans(inputs.tables, rows[:, 1].contiguous(), cache.size, longest)
        recurrent = Recurrent(inputs.states, rows[:, 3:], cache.states, cache.tails) if len(cache.states) else None
        slots = rows[:, 2].contiguous()
        now = CachedPass(spans, slots, cache.keys, cache.values, cache.longest, self.places, recurrent)
        with cached(now):
            ids, positions = rows[:, 0].unsqueeze(0), rows[:, 1].unsqueeze(0)
            hidden = self.model(input_ids=ids, position_ids=positions, attention_mask=None)
        if not len(inputs.draws):
            return rows.new_empty(0, 4)
        return self.head(hidden, inputs.draws, inputs.numbers, limits)

    def _replayed(self, inputs: Inputs, limits: int | None) -> Tensor:
        """Return a pass of single rows: the first of a kind as it is, then by a graph."""
        kind = len(inputs.rows), limits
        if kind not in self._seen:
            self._seen[kind] = self._on_device(inputs)
            return self._computed(self._seen[kind], 1, limits)
        held = self._seen[kind]
        for to, values in zip(held, inputs, strict=True):
            to.copy_(torch.from_numpy(values))
        if kind not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                out = self._computed(held, 1, limits)
            self._graphs[kind] = graph, out
        graph, out = self._graphs[kind]
        graph.replay()
        return out


def drawn(out: Tensor, count: int) -> list[Drawn]:
    """Return the first draws of a pass, when it is computed."""
    tokens, bits, ranks, digests = out[:count].cpu().numpy().T
    log_probabilities = bits.astype(np.int32).view(np.float32)
    return list(zip(*(column.tolist() for column in (tokens, log_probabilities, ranks, digests)), strict=True))


def new_cache(model: Any, count: int, size: int, longest: int, sequences: int, device: Any) -> Cache:
    """Return a cache of blocks 0 … count. longest: positions of the longest sequence. sequences: that run at once."""
    of_keys, *of_nets = shapes_of(model)
    layers, *each = of_keys
    keys, values = (
        torch.zeros(layers, (count + 1) * size, *each, dtype=torch.bfloat16, device=device) for _ in range(2)
    )
    states, tails = (
        torch.zeros(nets, (sequences + 1) if nets else 0, *sizes, dtype=dtype, device=device)
        for (nets, *sizes), dtype in zip(of_nets, (torch.float32, torch.bfloat16), strict=True)
    )
    return Cache(keys, values, size, longest, states, tails)


def _mixers(model: Any) -> list[Any]:
    return [getattr(layer, "self_attention", layer) for layer in model.decoder.layers]


def shapes_of(model: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of this rank's caches: keys of a token [layers, groups, d]; of a sequence states [nets, heads, value, key]
    and tails [nets, TAPS - 1, c].
    """
    config, mixers = model.config, _mixers(model)
    nets = [net for net in mixers if isinstance(net, PortableGatedDeltaNet)]
    width = config.kv_channels
    if config.multi_latent_attention:  # values are filled up to the width of keys
        width = config.qk_head_dim + config.qk_pos_emb_head_dim
    keys = len(mixers) - len(nets), max(1, config.num_query_groups // model.pg_collection.tp.size()), width
    if not nets:
        return keys, (0,), (0,)
    heads, value, key = nets[0].num_v_heads_local_tp, nets[0].value_head_dim, nets[0].key_head_dim
    return keys, (len(nets), heads, value, key), (len(nets), TAPS - 1, nets[0].conv_dim_local_tp)


def common(spans: Sequence[Span], tokens: int, group: Any, device: Any) -> Common:
    """Return it of the spans of each rank. tokens: of `Common`. group: of the ranks; None: there are no others."""
    samplings = (span.sequence.request.sampling for span in spans)
    mine = Common(
        sum(span.count for span in spans),
        max((span.count for span in spans), default=1),
        max((-1 if each.limits is None else each.limits for each in samplings), default=-1),
        tokens,
    )
    return mine if group is None else Common(*greatest(mine, group, device))


def greatest(values: Sequence[int], group: Any, device: Any) -> list[int]:
    """Return the greatest of each value over the ranks of a group."""
    most = torch.tensor(values, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return most.tolist()
