"""From hidden states to log-probabilities, in blocks of tokens: no tensor has vocabulary times sequence elements.

The output layer and the cross entropy are those of the run, by Megatron's names, so that its replacements hold.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp_invariant_recipes.features.inference.output import DIGEST
from tp_invariant_recipes.features.score.vocabulary import VocabularyRows
from tp_invariant_recipes.kernels.digest import row_digest
from tp_invariant_recipes.numerics.layers import cross_entropy
from tp_invariant_recipes.numerics.mode import Mode
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

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
