# SPDX-License-Identifier: Apache-2.0
"""The trial that decides whether one launch of attention may stand for one per shard: it sees a backend that lies.

It runs on a CPU here, with backends made for it; tests/gpu/kernels/test_attention_probe_gpu.py asks Transformer
Engine's.
"""

from dataclasses import dataclass
from functools import partial

import pytest
import torch

from tests.operands import threads
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.numerics.gemm.probe import cancelling_attention, cancelling_scores
from tp_invariant_recipes.numerics.layers import attention as attentions
from tp_invariant_recipes.numerics.layers.attention import TENSORS, Operands, attention

DTYPES = (torch.bfloat16, torch.float32)
SHARDS, HEADS, GROUPS, WIDTH = 4, 8, 4, 16
DEGREES = (1, 4)
OVER_KEYS, OVER_QUERIES = (partial(cancelling_attention, late=late) for late in (True, False))
# Whose sums a backend cuts -> the tensor that shows it, and the operands that cancel in these sums.
LIES = {
    "output": ("output", OVER_KEYS), "dQ": ("dQ", OVER_KEYS), "dK": ("dK", OVER_QUERIES), "dV": ("dV", OVER_QUERIES),
    "scores": ("output", cancelling_scores), "dP": ("dQ", cancelling_scores),
}  # fmt: skip


def product_in_parts(a, b, parts=1):
    """a @ b in fp32, the inner dimension in so many parts that are added in order."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for x, y in zip(a.float().chunk(parts, 1), b.float().chunk(parts), strict=True):
        total += x @ y
    return total


class Backend(torch.autograd.Function):
    """Causal attention head by head; the sums of one tensor are in `parts` parts."""

    @staticmethod
    def forward(ctx, query, key, value, parts):
        length, batch, heads, width = query.shape
        per_group = heads // key.shape[2]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        out, probabilities = torch.empty_like(query), {}
        for b in range(batch):
            for h in range(heads):
                q, k, v = query[:, b, h], key[:, b, h // per_group], value[:, b, h // per_group]
                scores = product_in_parts(q.contiguous(), k.t().contiguous(), parts["scores"]) / width**0.5
                p = probabilities[b, h] = scores.masked_fill(future, -torch.inf).softmax(-1)
                out[:, b, h] = product_in_parts(p, v.contiguous(), parts["output"])
        ctx.save_for_backward(query, key, value, out)
        ctx.probabilities, ctx.parts, ctx.per_group = probabilities, parts, per_group
        return out.flatten(2)

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, out = ctx.saved_tensors
        gradient = gradient.reshape(query.shape)
        grads = {"dQ": torch.zeros(query.shape), "dK": torch.zeros(key.shape), "dV": torch.zeros(value.shape)}
        for (b, h), p in ctx.probabilities.items():
            g = h // ctx.per_group
            do, q, k, v = gradient[:, b, h], query[:, b, h], key[:, b, g], value[:, b, g]
            delta = (do.float() * out[:, b, h].float()).sum(-1, keepdim=True)
            dp = product_in_parts(do.contiguous(), v.t().contiguous(), ctx.parts["dP"])
            ds = p * (dp - delta) / query.shape[3] ** 0.5
            grads["dQ"][:, b, h] = product_in_parts(ds, k.contiguous(), ctx.parts["dQ"])
            grads["dK"][:, b, g] += product_in_parts(ds.t().contiguous(), q.contiguous(), ctx.parts["dK"])
            grads["dV"][:, b, g] += product_in_parts(p.t().contiguous(), do.contiguous(), ctx.parts["dV"])
        return *(grads[name].to(query.dtype) for name in ("dQ", "dK", "dV")), None


@dataclass
class Core(attentions.Core):
    """A backend that splits the sums of one tensor where it is given more heads than one shard has."""

    lie: str = ""
    name: str = "made up"
    launches: int = 0

    def launch(self, query, key, value, mask):
        self.launches += 1
        several = query.shape[2] > HEADS // SHARDS
        return Backend.apply(query, key, value, {n: 2 if several and n == self.lie else 1 for n in LIES})

    def backend(self):
        return self.name

    def kind(self, mask):
        return (self.lie,)


@pytest.fixture(autouse=True)
def _undecided(monkeypatch):
    monkeypatch.setattr(attentions, "_batched_is_exact", {})
    with threads(1):  # products this small only wait for other threads
        yield


def probe_operands(dtype, seed=0, length=48, fill=None):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(length, 1, n, WIDTH) for n in (HEADS, GROUPS, GROUPS, HEADS)]
    made = Operands(*(torch.randn(shape, generator=generator).to(dtype) for shape in shapes))
    if fill:
        fill(*made, generator=generator)
    return made


def by_ranks(core, made, degree, form=attention):
    """Output and gradients of all heads, computed by `degree` ranks and put together."""
    ranks = []
    for rank in range(degree):
        leaves = [tensor.chunk(degree, 2)[rank].detach().requires_grad_() for tensor in made[:3]]
        out = form(core, *leaves, None, SHARDS // degree)
        gradient = made.gradient.chunk(degree, 2)[rank].reshape(out.shape)
        ranks.append((out.detach(), *torch.autograd.grad(out, leaves, gradient)))
    return [torch.cat(parts, dim) for parts, dim in zip(zip(*ranks, strict=True), (-1, 2, 2, 2), strict=True)]


def other_bits(a, b):
    return {name for name, x, y in zip(TENSORS, a, b, strict=True) if not attentions.same((x,), (y,))}


@pytest.mark.parametrize("lie", ("", *LIES))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_result_for_every_tp(dtype, lie):
    made = probe_operands(dtype, fill=LIES.get(lie, ("", OVER_KEYS))[1])
    results = [by_ranks(Core(lie), made, degree) for degree in DEGREES]
    assert other_bits(*results) == set()


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_launch_of_a_backend_that_lies_depends_on_tp(dtype, lie):
    """The control: the same operands, without the trial."""
    shows, fill = LIES[lie]
    made = probe_operands(dtype, fill=fill)
    single, four = (by_ranks(Core(lie), made, degree, attentions._batched) for degree in DEGREES)
    # The gradients of queries and keys contain the output's rounding.
    assert shows in other_bits(single, four)


@pytest.mark.parametrize("shards", (1, 2, 4))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_honest_backend_is_launched_once(dtype, shards):
    core, made = Core(), probe_operands(dtype)
    held = [tensor[:, :, : tensor.shape[2] * shards // SHARDS] for tensor in made[:3]]
    attention(core, *held, None, shards)
    assert list(attentions._batched_is_exact.values()) == [True]
    core.launches = 0
    attention(core, *held, None, shards)
    assert core.launches == 1


def test_a_gradient_of_minus_zero_stays_one():
    """Shards' gradients are put together; added to zeros, -0.0 would become 0.0 on ranks of several shards alone."""

    class Minus(Core):
        def launch(self, query, key, value, mask):
            return ((query + (key + value).repeat_interleave(HEADS // GROUPS, 2)) * -0.0).flatten(2)

    made = probe_operands(torch.float32)
    made.gradient.abs_()
    for degree in DEGREES:
        _, gradient, *_ = by_ranks(Minus(), made, degree, attentions._defined)
        assert gradient.signbit().all()


def test_a_backend_that_does_not_repeat_its_bits_is_an_error():
    class Restless(Core):
        def launch(self, query, key, value, mask):
            return super().launch(query, key, value, mask) + self.launches * 2.0**-10

    with pytest.raises(RunError, match="does not repeat its own bits"):
        attention(Restless(), *probe_operands(torch.float32)[:3], None, SHARDS)


def test_flash_attn_is_refused():
    with pytest.raises(RunError, match=r"attention ran flash 2\.8.*model\.attention_backend=fused or unfused"):
        attention(Core(name="flash 2.8"), *probe_operands(torch.float32)[:3], None, 1)
    assert attentions._batched_is_exact == {}


def test_live_operands_are_checked_on_request(monkeypatch):
    """A backend that lies about numbers that the trial does not have."""

    class Large(Core):
        def launch(self, query, key, value, mask):
            self.lie = "dK" if value.abs().max() > 1000 else ""
            return super().launch(query, key, value, mask)

        def kind(self, mask):
            return ()

    monkeypatch.setattr(attentions, "checking", lambda: True)
    small, large = (
        probe_operands(torch.float32)._replace(value=probe_operands(torch.float32).value * n) for n in (1, 10000)
    )
    true = by_ranks(Core(), small, 2)
    assert other_bits(by_ranks(Large(), small, 2), true) == set()
    with pytest.raises(RunError, match=r"TPI_CHECK_PRODUCTS=1: dK of attention \[48, 1, 4, 16\] with 2 groups"):
        by_ranks(Large(), large, 2)
