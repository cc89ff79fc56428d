"""The exchange of a row-parallel layer in blocks of tokens: the bits of the exchange in one piece.

It is for GPUs (tests/gpu/test_invariance_gpus.py trains with it). Here Gloo moves the bytes, and products of fixed
tiles, whose rows do not depend on each other either, stand for those of a GPU.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import on_ranks, terms
from tests.operands import same_bits
from tp_invariant_recipes.kernels.fixed_tile_product import fixed_tile_product
from tp_invariant_recipes.kernels.tree_add import tree_add
from tp_invariant_recipes.numerics.layers import linear
from tp_invariant_recipes.numerics.sums import tree
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

SHARDS, SIZES = 8, (2, 4)
TOKENS, FEATURES, DEPTH = 24, 5, 32


def right(tokens):
    return tokens


def of_the_next_rank(tokens):
    size = tokens.stop - tokens.start
    return slice(tokens.stop % TOKENS, tokens.stop % TOKENS + size)


def exchanged(mesh, nodes, block, moved):
    """By the exchange in one piece, then in blocks. block: the tokens to compute of those asked for; moved: by how many
    places the ranks' nodes are moved before they are added."""
    mine = terms(mesh.size * nodes, TOKENS, FEATURES).unflatten(0, (mesh.size, nodes))[mesh.rank]

    def node(tokens, out):
        tree_add(mine[:, block(tokens)].contiguous(), out)

    in_one_piece = tree.start_reduce_scatter(mine, mesh).finished(torch.float32)
    started = tree.start_reduce_scatter_in_blocks(node, TOKENS, FEATURES, mesh, mine.device)
    buffer = started.nodes.arrived()
    buffer.copy_(buffer.roll(moved, 0))
    return in_one_piece, started.finished(torch.float32)


def differing(size, nodes, block=right, moved=0):
    """The ranks on which the two differ."""
    found = on_ranks(size, SHARDS, exchanged, nodes, block, moved)
    return [rank for rank, pair in enumerate(found) if not same_bits(*pair)]


@pytest.mark.parametrize("nodes", (1, 2))
@pytest.mark.parametrize("size", SIZES)
def test_blocks_have_the_bits_of_one_piece(size, nodes):
    assert differing(size, nodes) == []


@pytest.mark.parametrize("size, wrong", ((2, {"block": of_the_next_rank}), (4, {"moved": 1})))
def test_another_block_or_order_has_other_bits(size, wrong):
    """The control. Of two ranks any order has the same bits."""
    assert differing(size, 2, **wrong) == [*range(size)]


def test_a_block_is_on_its_way_while_the_next_is_computed(monkeypatch):
    """Of four ranks, rank 1."""
    happened = []

    def exchange(arriving, leaving, received, sent, *, group, async_op):
        assert async_op
        assert len(arriving) == len(leaving) == sum(received) == sum(sent)
        happened.append(("to", sent.index(TOKENS // 4), "from", received.index(TOKENS // 4)))

    def node(tokens, out):
        happened.append(("compute", tokens.start // len(out)))

    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    tree.start_reduce_scatter_in_blocks(node, TOKENS, FEATURES, VirtualMesh(SHARDS, 4, 1), torch.device("cpu"))
    assert happened == [
        ("compute", 2),
        ("to", 2, "from", 0),
        ("compute", 3),
        ("to", 3, "from", 3),
        ("compute", 0),
        ("to", 0, "from", 2),
        ("compute", 1),
    ]


def test_tokens_that_the_ranks_do_not_divide_are_refused():
    def start(mesh):
        return tree.start_reduce_scatter_in_blocks(lambda *_: None, TOKENS - 1, FEATURES, mesh, torch.device("cpu"))

    with pytest.raises(RuntimeError, match="2 ranks do not divide 23 tokens"):
        on_ranks(2, SHARDS, start)


# Context shards of a rank, and whether the tokens stay divided among the ranks.
CASES = tuple(product((1, 2, 4), (False, True)))


def fixed_tiles(a, b, out, *, columns=1, add=False):
    return fixed_tile_product(a, b, out, add=add)


def partials(a, b, shards, segments):
    pairs = zip(a.chunk(shards, 1), b.chunk(shards), strict=True)
    return torch.stack([fixed_tile_product(x, y, torch.empty(len(a), b.shape[1])) for x, y in pairs])


def layer(mesh):
    """Case, whether in blocks -> the output and the input's gradient of this rank, and the exchanges of its forward."""
    x, weight = terms(DEPTH, TOKENS // 2, 2).movedim(0, 2), terms(FEATURES, DEPTH)
    x, weight = (one.chunk(mesh.size, -1)[mesh.rank].contiguous() for one in (x, weight))
    products = linear.Products(fixed_tiles, partials)
    exchange, exchanges, found = dist.all_to_all_single, [], {}

    def counted(arriving, leaving, *args, **kwargs):
        exchanges.append(len(leaving))
        return exchange(arriving, leaving, *args, **kwargs)

    dist.all_to_all_single = counted
    for (contexts, scattered), in_blocks in product(CASES, (False, True)):
        exchanges.clear()
        given = x.clone().requires_grad_()
        of_case = replace(mesh, contexts=contexts, in_blocks=in_blocks)
        y = linear.row_parallel(given, weight, of_case, scattered, products)
        forward = [*exchanges]
        (y * y.detach()).sum().backward()
        found[(contexts, scattered), in_blocks] = y.detach(), given.grad, forward
    return found


@pytest.fixture(scope="module")
def layers():
    return {size: on_ranks(size, SHARDS, layer) for size in (1, *SIZES)}


def whole(layers, size, case, in_blocks):
    ys, dxs, exchanges = zip(*(rank[case, in_blocks] for rank in layers[size]), strict=True)
    assert all(each == exchanges[0] for each in exchanges)
    y = torch.cat(ys) if case[1] else ys[0]
    assert case[1] or all(same_bits(y, other) for other in ys)
    return y, torch.cat(dxs, 2), exchanges[0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_has_one_result_in_blocks_and_in_one_piece(layers, case, size):
    y, dx, exchanges = whole(layers, 1, case, False)
    assert exchanges == []
    for in_blocks, expected in ((False, [TOKENS]), (True, [TOKENS // size] * (size - 1))):
        its_y, its_dx, exchanges = whole(layers, size, case, in_blocks)
        assert exchanges == expected
        assert same_bits(its_y, y)
        assert same_bits(its_dx, dx)


def test_one_rank_exchanges_nothing(layers):
    for case in CASES:
        assert same_bits(*(whole(layers, 1, case, in_blocks)[0] for in_blocks in (False, True)))
        assert whole(layers, 1, case, True)[2] == []
