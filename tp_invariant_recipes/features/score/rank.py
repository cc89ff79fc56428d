# SPDX-License-Identifier: Apache-2.0
"""A rank of `tpi score`: the model with a checkpoint's weights, forward passes, and rank 0 writes the lines."""

import copy
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tp_invariant_recipes.check.invariant import fp8
from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.features.inference import output
from tp_invariant_recipes.features.inference.output import DIGEST
from tp_invariant_recipes.features.inference.rank import WINDOWS, Batch, loaded_for_inference, plan, windows
from tp_invariant_recipes.features.score import vocabulary
from tp_invariant_recipes.features.score.vocabulary import VocabularyRows
from tp_invariant_recipes.kernels.digest import row_digest
from tp_invariant_recipes.numerics.layers import cross_entropy
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.numerics.mode import Mode
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.observe.union import gathered_by_first
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings import low_precision
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.training import heartbeat
from tp_invariant_recipes.training.heartbeat import Phase

BLOCK = 1024  # tokens whose logits exist at a time
STEP = 128  # tokens; blocks are filled up to a multiple, so that few shapes occur: products are tried for each
LOGPROB, RANK, ENTROPY = "logprobs", "ranks", "entropies"


@dataclass(frozen=True)
class Wanted:
    """What is computed of each token beside its log-probability."""

    ranks: bool = False
    entropies: bool = False
    digests: bool = False
    vocabulary: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the values of a token, in order."""
        rank, entropy = [RANK] if self.ranks else [], [ENTROPY] if self.entropies else []
        return (LOGPROB, *rank, *entropy, *(DIGEST if self.digests else ()))


class Head:
    """The output layer of the last pipeline stage, as a function of hidden states.

    model:  Megatron's model, unwrapped; it returns hidden states from here on.
    mode:   None: stock.
    alone:  whether a row's bits depend on the rows beside it. Then blocks are whole and lie where no batch moves them.
    table:  where the whole vocabulary is written; None: it is not.
    """

    def __init__(
        self, model: Any, mode: Mode | None, wanted: Wanted, table: VocabularyRows | None, *, alone: bool
    ) -> None:
        self.wanted, self.alone, self.table = wanted, alone, table
        self.layer = model.output_layer
        self.group = model.pg_collection.tp
        self.gathers = model.config.sequence_parallel and self.group.size() > 1
        self.contexts = getattr(model.config, "context_shards", model.config.context_parallel_size)
        self.contexts //= model.config.context_parallel_size
        self.dtype = model.config.params_dtype
        self.weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        self.scaled = model._scale_logits
        model.post_process = False
        # The layer gets whole blocks: what it does with a sequence's parts is done here.
        config = self.layer.config = copy.copy(self.layer.config)
        config.sequence_parallel = self.layer.sequence_parallel = False
        config.context_parallel_size = config.context_shards = 1
        shards = config.virtual_shards if mode else self.group.size()
        self.mesh = VirtualMesh.from_group(shards, self.group) if wanted.columns[1:] or table else VirtualMesh(1, 1, 0)
        self.kernels = mode.cross_entropy() if mode else cross_entropy.LIBRARY

    @torch.no_grad()
    def __call__(self, hidden: Tensor, targets: Tensor, places: Tensor | None = None) -> Tensor:
        """hidden: [s/(cp · t), b, h], or [s/cp, b, h] without sequence parallelism, of the tokens of a rank.

        targets: [b, s/cp] int64 on the host, the next token of each; -1: not scored.
        places:  [b, s/cp] int64 on the host, the row of each in the table.
        returns: [columns, b, s/cp] fp64, NaN where nothing is scored.
        """
        if self.gathers:
            slices, hidden = hidden, hidden.new_empty(hidden.shape[0] * self.group.size(), *hidden.shape[1:])
            dist.all_gather_into_tensor(hidden, slices.contiguous(), group=self.group)
        rows = hidden.to(self.dtype).transpose(0, 1).flatten(0, 1)  # [b · s, h]
        flat = targets.flatten()
        out = torch.full((len(self.wanted.columns), len(flat)), torch.nan, dtype=torch.float64, device=rows.device)
        for block in self._blocks(flat):  # of the host, which waits for no kernel
            filled = block if self.alone else torch.cat([block, block[:1].expand(-len(block) % STEP)])
            index, target = filled.to(rows.device), flat[filled].clamp(min=0).to(rows.device)
            logits = self.scaled(self.layer(rows[index].unsqueeze(1), weight=self.weight)[0])
            values = self._values(logits, target)
            if self.table is not None and places is not None:
                self._write(self.table, logits[: len(block), 0], flat[block] >= 0, places.flatten()[block])
            out[:, index[: len(block)]] = values[:, : len(block)]
        return out.view(-1, *targets.shape)

    def _blocks(self, targets: Tensor) -> Iterator[Tensor]:
        """Return indices of the rows of each block that has something to score."""
        if not self.alone:
            yield from (targets >= 0).nonzero().squeeze(1).split(BLOCK)
            return
        for part in torch.arange(len(targets)).chunk(self.contexts):
            yield from (block for block in part.split(BLOCK) if (targets[block] >= 0).any())

    def _write(self, table: VocabularyRows, logits: Tensor, scored: Tensor, places: Tensor) -> None:
        """Write [n, vocab/t], of which `scored`, bool [n] on the host, tells the rows that are."""
        rows = cross_entropy.log_probabilities(logits, self.mesh, self.kernels)
        table.write(places[scored], rows[scored.to(rows.device)], self.mesh.rank * rows.shape[1])

    def _values(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[n, 1, vocab/t] and [n] → [columns, n] fp64."""
        from megatron.core import tensor_parallel

        values = []
        if self.wanted.ranks:
            values.append(cross_entropy.rank_of(logits.squeeze(1), targets, self.mesh))
        if self.wanted.entropies:
            values.append(cross_entropy.entropy(logits.squeeze(1), self.mesh, self.kernels))
        if self.wanted.digests:
            values += self._digests(logits.squeeze(1))
        losses = tensor_parallel.vocab_parallel_cross_entropy(logits, targets.unsqueeze(1), tp_group=self.group)
        return torch.stack([column.double() for column in (0.0 - losses.squeeze(1), *values)])

    def _digests(self, logits: Tensor) -> list[Tensor]:
        """Digest all log-probabilities of each row: [rows, vocab/t] → both halves, two of [rows]."""
        rows = cross_entropy.log_probabilities(logits, self.mesh, self.kernels)
        digest = row_digest(rows, self.mesh.rank * rows.shape[1], self.mesh.size * rows.shape[1])
        if self.mesh.size > 1:
            dist.all_reduce(digest, group=self.mesh.group)
        return [digest >> 32 & 0xFFFFFFFF, digest & 0xFFFFFFFF]


CONTEXTS = 2  # chunks of a context shard


@dataclass(frozen=True)
class Score:
    """What a rank does: score the sequences of a file, and append a line for each to `out`.

    checkpoint: of a run; None: `config.weights.folder` has the weights. tokenizer: as of `sequences.tokenizer`; None:
    all sequences are token ids. done: sequences whose lines are there. tokens: of a forward pass.
    """

    config: RunConfig
    checkpoint: Path | None
    file: Path
    tokenizer: str | None
    out: Path
    done: int
    tokens: int
    wanted: Wanted

    def __call__(self, run_dir: RunDir, rank_info: Any) -> None:
        """Raise RunError: a log-probability is no number."""
        with loaded_for_inference(self.config, self.checkpoint) as model:
            table = VocabularyRows(vocabulary.beside(self.out)) if self.wanted.vocabulary else None
            forward = Forward(model, self.config, self.wanted, table)
            self.score(forward, sequences.tokenizer(self.tokenizer) if self.tokenizer else None)

    def score(self, forward: "Forward", codec: sequences.Codec | None) -> None:
        """Score what is left of the file. Rank 0 writes a window while the ranks compute the next."""
        remaining = sequences.sequences(self.file, self.config.shape.vocabulary, codec)
        row = sum(len(sequence.tokens) - sequence.first for sequence in islice(remaining, self.done))
        with ThreadPoolExecutor(1) as pool:
            writing: Future[None] | None = None
            for window in windows(remaining, WINDOWS["cpu" if self.config.device.kind == "cpu" else "cuda"]):
                if forward.table is not None:
                    forward.table.start = [*accumulate((len(s.tokens) - s.first for s in window), initial=row)]
                    row = forward.table.start[-1]
                scores = forward.window(window, self.tokens)
                if writing is not None:
                    writing.result()
                if dist.get_rank() == 0:
                    writing = pool.submit(append, self.out, window, scores, self.wanted.columns)
            if writing is not None:
                writing.result()


class Forward:
    """Forward passes of a model, in any layout. Every rank calls `window` with the same sequences.

    model: a chunk of Megatron's, on this rank. config: of the run. table: as of `Head`.
    """

    def __init__(self, model: Any, config: RunConfig, wanted: Wanted, table: VocabularyRows | None = None) -> None:
        from megatron.core import parallel_state
        from megatron.core.utils import unwrap_model

        from tp_invariant_recipes.numerics.megatron.attention.core_attention import CoreAttention

        self.state, self.model, self.columns, self.count = parallel_state, model, len(wanted.columns), 0
        self.table = table
        self.shards = config.numerics.context_shards or config.model["context_parallel_size"]
        self.multiple = self.shards * max(CONTEXTS, config.numerics.virtual_shards or 1, fp8.tokens(config))
        self.alone = depends_on_rows(config)
        self.learned = config.shape.sequence  # positions, if any: padding, which no token sees, has the last one
        # In training mode kernels are those of a training step, without the dropout that planning has refused.
        model.train()
        inner = unwrap_model(model)
        # Of stages. A provider would refuse it beside some dispatchers, which no pass uses here.
        inner.config.variable_seq_lengths = True
        for module in inner.modules():
            if isinstance(module, CoreAttention):
                module.by_sequence = True
        self.last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        self.head = Head(inner, config.numerics.arithmetic, wanted, table, alone=self.alone) if self.last else None

    def window(self, window: Sequence[sequences.Sequence], tokens: int) -> list[np.ndarray]:
        """Return the values of each sequence's scored tokens, [columns, scored] fp64, on rank 0. tokens: of a pass."""
        state = self.state
        size, rank = state.get_data_parallel_world_size(), state.get_data_parallel_rank()
        lengths = [len(sequence.tokens) for sequence in window]
        passes = plan(lengths, self.multiple, 0 if self.alone else tokens, size, rank)
        return self._gathered(window, passes, self.passes(passes, window))

    def passes(self, passes: Sequence[Batch], window: Sequence[sequences.Sequence]) -> list[Tensor]:
        """Forward passes: on the last stage the values of each, [columns, b, s/cp], elsewhere nothing."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        return get_forward_backward_func()(
            forward_step_func=self._step,
            data_iterator=((batch, window) for batch in passes),
            model=[self.model],
            num_microbatches=len(passes),
            seq_length=passes[0].length,
            micro_batch_size=1,
            forward_only=True,
        )

    def _step(self, data: Iterator, model: Any) -> tuple[Tensor, None]:
        batch, window = next(data)
        self.count += 1
        heartbeat.sign(Phase.LONG_STEP, self.count)
        tokens, targets = _tensors(batch, window)
        held = self._held(batch.length)
        positions = held.clamp(max=self.learned - 1).expand(len(tokens), -1)
        hidden = model(input_ids=tokens[:, held].cuda(), position_ids=positions.cuda(), attention_mask=None)
        if self.head is None:
            return hidden, None
        starts = [self.table.start[n] - window[n].first + 1 for n in batch.places] if self.table else []
        places = torch.tensor(starts)[:, None] + held if starts else None
        return self.head(hidden, targets[:, held], places), None

    def _held(self, length: int) -> Tensor:
        from tp_invariant_recipes.numerics.sums.data_shards import positions

        ranks, rank = self.state.get_context_parallel_world_size(), self.state.get_context_parallel_rank()
        return positions(length, self.shards, ranks, rank) if self.shards > 1 else torch.arange(length)

    def _gathered(
        self, window: Sequence[sequences.Sequence], passes: Sequence[Batch], outputs: list[Tensor]
    ) -> list[np.ndarray]:
        """Gather [columns, b, s/cp] of passes from the last stage, of one rank of tp, of all positions of cp."""
        mine: list[tuple[int, np.ndarray, np.ndarray]] = []
        if self.last and self.state.get_tensor_model_parallel_rank() == 0:
            for batch, output in zip(passes, outputs, strict=True):
                values, held = output.cpu().numpy(), self._held(batch.length).numpy()
                for n, place in enumerate(batch.places):
                    scored = (held + 1 >= window[place].first) & (held + 1 < len(window[place].tokens))
                    mine.append((place, held[scored], values[:, n, scored]))
        parts = gathered_by_first(mine)
        scores = (
            [np.full((self.columns, len(sequence.tokens) - sequence.first), np.nan) for sequence in window]
            if parts
            else []
        )
        for place, positions, values in (entry for part in parts for entry in part):
            scores[place][:, positions + 1 - window[place].first] = values
        for sequence, values in zip(window if parts else (), scores, strict=True):
            if not np.isfinite(values).all():
                at = sequence.first + int(np.argmin(np.isfinite(values).all(0)))
                raise RunError(
                    f"sequence {sequence.id}: the score of token {at} is no finite number: "
                    f"{values[0, at - sequence.first]}"
                )
        return scores


def depends_on_rows(config: RunConfig) -> bool:
    """Return whether the bits of a token depend on how many tokens are computed with it.

    Rows of a product are independent where it walks k in order (numerics/gemm/defined.py): under the modes with
    such products on a GPU, and everywhere where a mode has the same bits on any machine. Scales of FP8 are of a whole
    tensor, and Mamba's scan and the gated delta rule are a library's products. Stock promises nothing.
    """
    arithmetic = config.numerics.arithmetic
    if arithmetic is None:
        return False
    defined = arithmetic.any_machine or (config.device.kind == "gpu" and arithmetic.tries_products)
    by_shape = config.shape.hybrid or bool(families.delta_sizes(config.model))
    return not defined or low_precision.enabled(config) or by_shape


def _tensors(batch: Batch, window: Sequence[sequences.Sequence]) -> tuple[Tensor, Tensor]:
    """Tokens and the next token of each, -1 where it is not scored: [b, s] int64, padded at the end."""
    tokens = np.zeros((len(batch.places), batch.length), np.int64)
    targets = np.full_like(tokens, -1)
    for n, sequence in enumerate(window[place] for place in batch.places):
        tokens[n, : len(sequence.tokens)] = sequence.tokens
        targets[n, sequence.first - 1 : len(sequence.tokens) - 1] = sequence.tokens[sequence.first :]
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def append(
    file: Path, window: Sequence[sequences.Sequence], scores: Sequence[np.ndarray], columns: Sequence[str]
) -> None:
    """Write the lines of a window and wait until they are on the disk. scores: [columns, scored] fp64 of each."""
    with file.open("ab") as stream:
        for sequence, values in zip(window, scores, strict=True):
            stream.write(output.line(sequence, values, columns))
        stream.flush()
        os.fsync(stream.fileno())
