"""Sums over tokens, feature by feature, in an order that is independent of the number of features.

Each of n shards has its tokens in L equal leaves; a leaf is added token by token, from +0. The Triton kernel and the
plain torch beside it do the same additions in the same order, so a CPU and a GPU agree to the last bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.folding_sum import leaves_of
from tp_invariant_recipes.kernels.launch import Kernel

BLOCK = 256


def token_sum(values: Tensor, shards: int) -> Tensor:
    """Return the sum of each leaf of each shard.

    values:  [tokens, features]; shards: n, which divides tokens.
    returns: [n, L, features] fp32; L is a power of two and depends only on tokens/n.
    """
    return _token_sum_triton(values, shards) if values.is_cuda else _token_sum_torch(values, shards)


def _token_sum_torch(values: Tensor, shards: int) -> Tensor:
    leaves = leaves_of(len(values) // shards)
    total = torch.zeros(shards, leaves, values.shape[1])
    for token in values.float().view(shards, leaves, -1, values.shape[1]).unbind(2):
        total += token
    return total


def _token_sum_triton(values: Tensor, shards: int) -> Tensor:
    tokens, features = values.shape
    values = values.contiguous()
    leaves = leaves_of(tokens // shards)
    out = torch.empty(shards, leaves, features, dtype=torch.float32, device=values.device)
    grid = (triton.cdiv(features, BLOCK), shards * leaves)
    constants = (tokens // shards // leaves, features % 16 == 0, BLOCK)
    KERNEL.launch(grid, (values, out), (features,), constants)
    return out


@triton.jit(do_not_specialize=["features"])
def _token_sum(values, out, features, TOKENS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    if ALIGNED:
        features = tl.multiple_of(features, 16)
    leaf = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < features
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for token in range(TOKENS):
        total += tl.load(values + (leaf * TOKENS + token) * features + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + leaf * features + column, total, mask=inside)


KERNEL = Kernel(_token_sum)
