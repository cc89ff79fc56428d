# SPDX-License-Identifier: Apache-2.0
"""Packed sequences: the sequences of a row are computed one by one, as if each were a micro-batch of its own.

    row       [ sequence 0 | sequence 1 | padding ]      cu_seqlens 0, 32, 96, 128 (Megatron's PackedSeqParams, "thd")
    forward     sequence 1, then sequence 0               attention, positions and router see one sequence
    backward    sequence 0, then sequence 1               each adds its weight gradients as a micro-batch does

So the bits of a sequence do not depend on what it is packed with: with `model.calculate_per_token_loss=true` a step has
the bits of the same sequences in micro-batches of one, in the same order. autograd runs what was recorded last first:
the forward passes go from the last sequence to the first.

A row's padding, which has no token that counts, is not computed. Mamba layers begin each sequence with an empty state.

With ep > tp the experts exchange tokens of several rows, whose numbers of sequences differ. A rank with fewer takes
part with idle passes, of a sequence that it has: they route no token, and their gradients are zeros. No token of theirs
counts in MTP, whose losses no gradient of the output scales.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.numerics.sums import bucket_reduction
from tp_invariant_recipes.numerics.sums.bucket_reduction import SequencePass

BY_TOKEN = ("input_ids", "position_ids", "labels", "loss_mask")  # [1, tokens]
WITHOUT = ("decoder_input", "inference_context", "inference_params", "padding_mask", "output_processor")

Sequences = list[tuple[int, bool]]  # of a row: the tokens of each, and whether any of them counts

_recomputing = [False]  # whether layers are computed again in a backward pass
_rows = count()
_latest: list[Sequences] = [[]]  # of the row that ran last; Megatron then asks for its loss


def sequences_of(packed: Any, shards: int) -> Sequences:
    """Return the sequences of a row as it lies in memory.

    packed: Megatron's PackedSeqParams. shards: V, which must divide each length.
    Raises ValueError where it does not.
    """
    logical = packed.cu_seqlens_q
    physical = logical if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    sizes = [(ends[1:] - ends[:-1]).tolist() for ends in (physical, logical)]
    sequences = [(length, bool(tokens)) for length, tokens in zip(*sizes, strict=True) if length]
    uneven = [length for length, _ in sequences if length % shards]
    if uneven:
        raise ValueError(
            f"{shards} virtual shards do not divide a packed sequence of {uneven[0]} tokens; "
            f"dataset.offline_packing_specs.pad_seq_to_mult={shards}"
        )
    return sequences


def looped(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a replacement for the forward of Megatron's GPTModel and HybridModel.

    Outputs: [tokens/t, 1, h] of a stage, [1, tokens] of the last one with labels, [1, tokens, n] without.
    """

    def forward(self: Any, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Tensor:
        if packed_seq_params is None:
            return original(self, *args, **kwargs)
        given = dict(zip(("input_ids", "position_ids", "attention_mask"), args, strict=False)) | kwargs
        refused = [name for name in WITHOUT if given.get(name) is not None]
        if refused or len(args) > 3:
            raise NotImplementedError(f"packed sequences with {', '.join(refused) or 'other arguments by place'}")
        given["attention_mask"] = None
        _latest[0] = sequences = sequences_of(packed_seq_params, self.config.virtual_shards)
        _recomputing[0] = self.config.recompute_granularity is not None
        return _joined(self, original, given, sequences)

    return forward


def _joined(model: Any, original: Callable[..., Tensor], given: dict[str, Any], sequences: Sequences) -> Tensor:
    sizes = [length for length, _ in sequences]
    each = _inputs(given, sizes)
    received = None if model.pre_process else model.decoder.input_tensor
    if received is not None:
        # split, not slices: its gradient is put together, and not added to zeros, which loses the sign of -0.0.
        received = received.split([size * len(received) // sum(sizes) for size in sizes])
    outputs: list[Tensor | None] = [None] * len(sizes)
    idle: list[Tensor] = []
    lengths = {number: length for number, (length, counts) in enumerate(sequences) if counts}
    row, tokens, by_token = next(_rows), sum(lengths.values()), model.config.calculate_per_token_loss
    shares = {number: length / tokens for number, length in lengths.items()}
    real = [
        SequencePass(row, number, False, 1.0 if by_token else share, share if by_token else 1.0)
        for number, share in shares.items()
    ]
    shortest = min(lengths, key=lengths.__getitem__)
    for now in [SequencePass(row, shortest, idle=True)] * (_most(model.config, len(real)) - len(real)) + real[::-1]:
        if received is not None:
            part = received[now.number]
            model.decoder.set_input_tensor(part.detach().requires_grad_() if now.idle else part)
        bucket_reduction.enter(now)
        output = original(model, **(_uncounted(each[now.number]) if now.idle else each[now.number]))
        output = _Marked.apply(output, now) if output.requires_grad else output
        if now.idle:
            idle.append(output)
        else:
            outputs[now.number] = output
    bucket_reduction.enter(None)
    dim = 1 if model.post_process else 0
    # Zeros where this rank has computed no output, as long as the sequences are.
    number, computed = next((n, output) for n, output in enumerate(outputs) if output is not None)
    for other, size in enumerate(sizes):
        if outputs[other] is None:
            shape = [*computed.shape]
            shape[dim] = shape[dim] * size // sizes[number]
            outputs[other] = computed.new_zeros(shape)
    return _Joined.apply(dim, idle, *outputs, *idle) if idle else torch.cat(outputs, dim)  # type: ignore[arg-type]


def _inputs(given: dict[str, Any], sizes: list[int]) -> list[dict[str, Any]]:
    """Return the inputs of each sequence. given: those of all, of which BY_TOKEN have tokens along dimension 1."""
    each = [dict(given) for _ in sizes]
    for name in (name for name in BY_TOKEN if given.get(name) is not None):
        for inputs, part in zip(each, given[name].split(sizes, 1), strict=True):
            inputs[name] = part
    return each


def _uncounted(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a pass in which no token counts. In the model only MTP reads the mask."""
    labels = given.get("labels")
    return given if labels is None else given | {"loss_mask": torch.zeros_like(labels)}


def _most(config: Any, own: int) -> int:
    """Return the largest number of sequences of the rows whose tokens go to the same experts now."""
    if not config.num_moe_experts or config.expert_model_parallel_size <= config.tensor_model_parallel_size:
        return own
    from megatron.core import parallel_state

    most = torch.tensor([own], device=torch.cuda.current_device())
    torch.distributed.all_reduce(
        most, torch.distributed.ReduceOp.MAX, group=parallel_state.get_expert_model_parallel_group()
    )
    return int(most.item())


def ready_at_the_end(original: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement for register_grad_ready of Megatron's groups of buckets, for layers that are computed again.

    Each has a backward pass of its own for each sequence, and Megatron takes a gradient for complete when it has been
    added to as often as in the first step. Buckets are then reduced when all micro-batches are done.
    """

    def register_grad_ready(self: Any, *args: Any, **kwargs: Any) -> None:
        if bucket_reduction.current() is None or not _recomputing[0]:
            original(self, *args, **kwargs)

    return register_grad_ready


class _Marked(torch.autograd.Function):
    """A pass' output; its gradient says that the backward pass begins, in which layers may be computed again."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, now: SequencePass) -> Tensor:
        ctx.now = now
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        bucket_reduction.enter(ctx.now)
        return gradients[0], None


class _Joined(torch.autograd.Function):
    """A row's output; the outputs of idle passes get zeros as gradients, so that these have a backward pass too."""

    @staticmethod
    def forward(ctx: Any, dim: int, idle: list[Tensor], *outputs: Tensor) -> Tensor:
        real = outputs[: len(outputs) - len(idle)]
        ctx.dim, ctx.sizes = dim, [output.shape[dim] for output in real]
        ctx.idle = [(output.shape, output.dtype, output.device) for output in idle]
        return torch.cat(real, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.idle]
        return None, None, *gradients[0].split(ctx.sizes, ctx.dim), *zeros


def loss_of_each(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for Bridge's masked_next_token_loss, made from that function, which checks the loss.

    What is logged of a packed row is [sequences, 2] fp32: of each the sum of losses, and its tokens.
    """

    def masked_next_token_loss(loss_mask: Tensor, output_tensor: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        loss, tokens, report = original(loss_mask, output_tensor, *args, **kwargs)
        row, _latest[0] = _latest[0], []
        if row:
            sizes = [length for length, _ in row]
            losses, mask = output_tensor.detach().view(-1).float(), loss_mask.view(-1).float()
            parts = zip(losses.split(sizes), mask.split(sizes), row, strict=True)
            sums = [torch.stack(((part * counted).sum(), counted.sum())) for part, counted, (_, any_) in parts if any_]
            report = {"lm loss": torch.stack(sums)}
        return loss, tokens, report

    return masked_next_token_loss
