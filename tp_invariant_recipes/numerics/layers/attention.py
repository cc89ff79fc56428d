# SPDX-License-Identifier: Apache-2.0
"""Core attention on the heads of one virtual shard.

Attention is *defined* shard by shard: a backend's result for the heads and query groups of one shard alone, on dense
operands. That launch has one shape for every t. Heads never mix, but a backend may group or split its sums by the
number of heads it is given; flash-attn's backward does so with dQ. So one launch for all shards of a rank is taken
only where it was seen, on this machine and in this process, to give the bits of the definition: of the output and of
all three gradients. The exactness check's operands cancel (numerics/gemm/probe.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.function_modes import LayerFunction, outside_modes
from tp_invariant_recipes.numerics.gemm import sampling
from tp_invariant_recipes.numerics.gemm.cublas import CHECK, checking, settings, tried
from tp_invariant_recipes.numerics.gemm.operands import dense, same_bits
from tp_invariant_recipes.numerics.gemm.probe import cancelling_attention, cancelling_scores
from tp_invariant_recipes.numerics.sums import data_shards


@dataclass(frozen=True)
class HeadExchange:
    """shards: C. cp: ranks that share sequences. group: their process group; None when cp is 1."""

    shards: int
    cp: int = 1
    group: Any = None

    def to_heads(self, x: Tensor) -> Tensor:
        """[s/cp, b, heads, d] → [s, b, heads/cp, d]; cp divides heads."""
        return x if self.shards == 1 else _Exchanged.apply(x, self, _heads, _tokens)

    def to_tokens(self, x: Tensor, heads: int) -> Tensor:
        """[s, b, heads/cp · d] → [s/cp, b, heads · d]. heads: of a rank before the exchange."""
        if self.shards == 1:
            return x
        return _Exchanged.apply(x.unflatten(2, (heads // self.cp, -1)), self, _tokens, _heads).flatten(2)


Move = Callable[[Tensor, HeadExchange], Tensor]


class _Exchanged(LayerFunction):
    """One of `_heads` and `_tokens`, whose gradient the other exchanges."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: HeadExchange, there: Move, back: Move) -> Tensor:
        ctx.exchange, ctx.back = exchange, back
        return there(x, exchange)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradients[0], ctx.exchange), None, None, None


def _heads(x: Tensor, exchange: HeadExchange) -> Tensor:
    tokens, batch, heads, width = x.shape
    leaving = x.reshape(tokens, batch, exchange.cp, heads // exchange.cp, width)
    arrived = _moved(leaving.permute(2, 0, 1, 3, 4), exchange).flatten(0, 1)
    return arrived[_places(arrived.shape[0], exchange.shards, arrived.device)]


def _tokens(x: Tensor, exchange: HeadExchange) -> Tensor:
    held = x[data_shards.positions(x.shape[0], exchange.shards, device=x.device)]
    arrived = _moved(held.unflatten(0, (exchange.cp, -1)), exchange)
    return arrived.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _moved(parts: Tensor, exchange: HeadExchange) -> Tensor:
    """[cp, …], part r for rank r → [cp, …], part r of rank r."""
    if exchange.group is None:
        return parts
    parts = parts.contiguous()
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=exchange.group)
    return arrived


@cache
def _places(length: int, shards: int, device: torch.device) -> Tensor:
    """Return where each position of the sequence is held."""
    return data_shards.positions(length, shards).argsort().to(device)


Form = Callable[..., Tensor]  # `_batched` or `_defined`
TENSORS = ("output", "dQ", "dK", "dV")
GRADIENTS = (*TENSORS[1:], "dSinks")
# What fills the operands of each: sums cancel over keys, over queries, over features; None: normal numbers.
TRIALS = (
    partial(cancelling_attention, late=True), partial(cancelling_attention, late=False), cancelling_scores, None,
)  # fmt: skip
REFUSED = ("flash",)  # by source, its dQ depends on the number of heads of a launch

# (backend's settings, shapes, dtype, shards, torch's settings) -> whether one launch has the bits of the definition.
_batched_is_exact: dict[tuple[Any, ...], bool] = {}


class Operands(NamedTuple):
    """Of attention and its backward pass. query: [s, b, h, d]; key: [s, b, g, d]; value: [s, b, g, v].

    gradient: of the output, [s, b, h, v]. v is d, but for multi-latent attention.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    gradient: Tensor


class Core(ABC):
    """A backend of attention with its settings."""

    @abstractmethod
    def launch(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, sinks: Tensor | None = None) -> Tensor:
        """Attention of the heads given, however many: [s, b, h, d], [s, b, g, d], [s, b, g, v] → [s, b, h · v].

        sinks: [h], a score of each head that has no value (GPT-OSS); None: a softmax without it.
        """

    @abstractmethod
    def backend(self) -> str:
        """Return the name of what the latest launch ran: a word, and details."""

    @abstractmethod
    def kind(self, mask: Any) -> tuple[Any, ...]:
        """All that tells its launches on operands of one shape and dtype apart."""


def attention(
    core: Core, query: Tensor, key: Tensor, value: Tensor, mask: Any, shards: int, sinks: Tensor | None = None
) -> Tensor:
    """softmax(query · key^T) · value with the bits of one launch for each shard.

    query:      [s, b, h, d], the heads of this rank's shards in order.
    key, value: [s, b, g, d] and [s, b, g, v], their query groups; `shards` divides g, and g divides h.
    mask:       as the backend takes it, the same for all heads.
    shards:     V/t.
    sinks:      [h], as of `Core.launch`.
    returns:    [s, b, h · v].
    Raises RunError where the backend is refused, or does not repeat its own bits.
    """
    more = () if sinks is None else (sinks,)
    # Without gradients a forward pass is tried by itself: `tpi score` has a shape for every length, and a backend plans
    # each kernel of each for up to a second.
    graded = torch.is_grad_enabled()
    query, key, value, case = _case(core, query, key, value, mask, shards, graded)
    trial = partial(check_passes, core, query, key, value, mask, shards, *more, graded=graded)
    batched = tried(_batched_is_exact, case, query, trial)
    if batched and shards > 1 and checking():
        return _Checked.apply(core, mask, shards, query, key, value, *more)
    out = (_batched if batched else _defined)(core, query, key, value, mask, shards, *more)

    def recompute(number: int) -> Tensor:
        q, k, v = (dense(operand.chunk(shards, 2)[number]).detach().requires_grad_() for operand in (query, key, value))
        part = (sink.chunk(shards)[number].detach() for sink in more)
        # With its backward pass, for which a backend may launch another kernel.
        return core.launch(q, k, v, mask, *part)

    sampling.repeat(out, recompute, shards, getattr(core, "layer_number", None))
    return out


@outside_modes
def _case(
    core: Core, query: Tensor, key: Tensor, value: Tensor, mask: Any, *more: Any
) -> tuple[Tensor, Tensor, Tensor, tuple[Any, ...]]:
    """Return the operands without gaps, and what an exactness check of them holds for."""
    query, key, value = dense(query), dense(key), dense(value)
    return query, key, value, (query.shape, key.shape, value.shape, query.dtype, core.kind(mask), settings(), *more)


def attention_of_each(
    core: Core, query: Tensor, key: Tensor, value: Tensor, mask: Any, shards: int, sinks: Tensor | None = None
) -> Tensor:
    """`attention` of several sequences with the bits that each has by itself; a forward pass alone.

    Arguments and result as of `attention`. One launch for all is taken only where an exactness check gives these bits.
    """

    def in_one_launch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(core, query, key, value, mask, shards, sinks)

    def looped(*operands: Tensor) -> Tensor:
        return torch.cat(
            [in_one_launch(*parts) for parts in zip(*(operand.split(1, 1) for operand in operands), strict=True)], 1
        )

    def trial() -> bool:
        tried_on = (made[:3] for made, _ in check_operands(query, key, value))
        return all(same((looped(*trial_inputs),), (in_one_launch(*trial_inputs),)) for trial_inputs in tried_on)

    case = ("of each", shards, query.shape, key.shape, value.shape, query.dtype, core.kind(mask), settings())
    return (in_one_launch if tried(_batched_is_exact, case, query, trial) else looped)(query, key, value)


def _batched(core: Core, query: Tensor, key: Tensor, value: Tensor, mask: Any, shards: int, *sinks: Tensor) -> Tensor:
    out = core.launch(query, key, value, mask, *sinks)
    if out.requires_grad:  # where the gradient is a slice, a backend may choose another algorithm for its strides
        out.register_hook(outside_modes(dense))
    return out


def _defined(core: Core, query: Tensor, key: Tensor, value: Tensor, mask: Any, shards: int, *sinks: Tensor) -> Tensor:
    # split, not narrow: its gradient is put together, and not added to zeros, which loses the sign of -0.0.
    heads = (tensor.split(tensor.shape[2] // shards, 2) for tensor in (query, key, value))
    parts = zip(*heads, *(sink.split(len(sink) // shards) for sink in sinks), strict=True)
    return torch.cat([_batched(core, dense(q), dense(k), dense(v), mask, 1, *s) for q, k, v, *s in parts], -1)


def check_operands(query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[Operands, torch.Generator]]:
    """Yield the operands of each exactness check, of these shapes, and what draws more of them."""
    generator = torch.Generator(query.device).manual_seed(0)
    for fill in TRIALS:
        gradient = query.new_empty(*query.shape[:-1], value.shape[-1])
        operands = Operands(*(torch.empty_like(tensor) for tensor in (query, key, value, gradient)))
        if fill:
            fill(*operands, generator=generator)
        else:
            for tensor in operands:
                tensor.normal_(generator=generator)
        yield operands, generator


def check_passes(
    core: Core, query: Tensor, key: Tensor, value: Tensor, mask: Any, shards: int, *sinks: Tensor, graded: bool = True
) -> bool:
    """Try both forms on operands of these shapes. graded: also their backward passes."""
    for operands, generator in check_operands(query, key, value):
        scores = [torch.empty_like(sink).normal_(generator=generator) for sink in sinks]
        outcome_of = partial(
            outcome, core=core, operands=operands, mask=mask, shards=shards, sinks=scores, graded=graded
        )
        expected = outcome_of(_defined)
        _admitted(core.backend())
        if not same(expected, outcome_of(_defined)):
            raise RunError(f"attention by {core.backend()} does not repeat its own bits")
        if shards > 1 and not same(expected, outcome_of(_batched)):
            return False
    return True


def _admitted(backend: str) -> None:
    if backend.split(maxsplit=1)[0] in REFUSED:
        raise RunError(
            f"attention ran {backend}, whose gradients may depend on tp; set model.attention_backend=fused or unfused, "
            f"or numerics=stock"
        )


def outcome(
    form: Form,
    core: Core,
    operands: Operands,
    mask: Any,
    shards: int,
    sinks: Sequence[Tensor] = (),
    *,
    graded: bool = True,
) -> tuple[Tensor, ...]:
    """Output and gradients (TENSORS, and of sinks) of `_batched` or `_defined`; without `graded` the output alone."""
    if not graded:
        with torch.no_grad():
            return (form(core, *operands[:3], mask, shards, *sinks),)
    leaves, out = _recorded(form, core, (*operands[:3], *sinks), mask, shards)
    return out.detach(), *torch.autograd.grad(out, leaves, operands.gradient.reshape(out.shape))


def _recorded(
    form: Form, core: Core, inputs: Sequence[Tensor], mask: Any, shards: int
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return a form's output with its graph, which begins at copies of the inputs. returns: the copies, output."""
    query, key, value, *sinks = leaves = tuple(tensor.detach().requires_grad_() for tensor in inputs)
    with torch.enable_grad():
        return leaves, form(core, query, key, value, mask, shards, *sinks)


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    """Whether all tensors of two outcomes hold the same bits."""
    return all(same_bits(x.contiguous(), y.contiguous()) for x, y in zip(a, b, strict=True))


class _Checked(torch.autograd.Function):
    """Both forms on the operands of the run."""

    @staticmethod
    def forward(ctx: Any, core: Any, mask: Tensor | None, shards: Any, *inputs: Tensor) -> Tensor:
        ctx.core, ctx.shards = core, shards
        ctx.recorded = [_recorded(form, core, inputs, mask, shards) for form in (_batched, _defined)]
        (_, first), (_, second) = ctx.recorded
        _compare(core, inputs, shards, (first,), (second,), TENSORS[:1])
        return first.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        first, second = (torch.autograd.grad(out, leaves, gradient) for leaves, out in ctx.recorded)
        _compare(ctx.core, ctx.recorded[0][0], ctx.shards, first, second, GRADIENTS[: len(first)])
        return None, None, None, *first


def _compare(core: Core, inputs: Any, shards: int, first: Any, second: Any, names: tuple[str, ...]) -> None:
    different = [name for name, x, y in zip(names, first, second, strict=True) if not same((x,), (y,))]
    if different:
        raise RunError(
            f"{CHECK}=1: {', '.join(different)} of attention {[*inputs[0].shape]} with {inputs[1].shape[2]} groups in "
            f"one launch is not bitwise identical to {shards} shards ({core.backend()}, {inputs[0].dtype}): "
            "the runtime exactness check of layers/attention.py did not detect it"
        )
