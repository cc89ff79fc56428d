# SPDX-License-Identifier: Apache-2.0
"""Initial weights: normal, and a function of seed, name and place in the whole tensor alone. How a Mamba mixer's own
parameters start: Megatron's distributions, accurate, and one tensor for all degrees.
"""

import hashlib
import math
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.operands import same_bits
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.kernels.cpu import normal_cpu
from tp_invariant_recipes.kernels.normal_quantile import WORD, philox4x32
from tp_invariant_recipes.numerics.megatron import init
from tp_invariant_recipes.numerics.megatron.families import mamba
from tp_invariant_recipes.numerics.megatron.init import initialise, sample

HIDDEN, HEADS, GROUPS, HEAD, FFN, VOCAB, LAYERS = 16, 8, 4, 4, 24, 32, 4
STD = 0.02


def normal(shape, ranges, *, std, mean=0.0, **options) -> Tensor:
    return sample(shape, ranges, init._Normal(std, mean), **options)


def whole_weight(shape, **options) -> Tensor:
    return normal(shape, [[(0, n)] for n in shape], **{"seed": 1, "name": "w", "std": 1.0} | options)


@st.composite
def shapes_and_segments(draw):
    """A shape, and segments of each dimension."""
    shape = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    ranges = []
    for size in shape:
        cuts = st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda c: (min(c), max(c)))
        ranges.append(draw(st.lists(cuts, min_size=1, max_size=3)))
    return shape, ranges


@given(part=shapes_and_segments(), chunk=st.sampled_from((1, 5, 64, 1 << 17)))
@settings(max_examples=settings.default.max_examples // 2, deadline=None)
def test_a_shard_is_a_slice_of_the_whole(part, chunk):
    shape, ranges = part
    chunk = max(chunk, math.prod(sum(b - a for a, b in segments) for segments in ranges) // 100)  # each takes its time
    expected = whole_weight(shape)
    for dim, segments in enumerate(ranges):
        expected = torch.cat([expected.narrow(dim, start, stop - start) for start, stop in segments], dim)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "CHUNK", chunk)
        assert same_bits(normal(shape, ranges, seed=1, name="w", std=1.0), expected)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_compiled_numbers_have_the_same_bits(monkeypatch, dtype):
    """Ranges that begin at odd columns, more columns than are computed at once, a seed of 64 bits, the far tails."""
    shape, ranges = (40, 3001), [[(3, 7), (11, 40)], [(1, 1500), (1501, 3001)]]
    options = {"seed": (1 << 64) - 5, "name": "w", "std": 0.02, "dtype": dtype}
    expected = normal(shape, ranges, **options)
    monkeypatch.setattr(init, "COMPILED", 0)
    assert same_bits(normal(shape, ranges, **options), expected)
    assert not same_bits(normal(shape, ranges, **options | {"seed": 5}), expected)


def test_compiled_far_tails_have_the_same_bits(monkeypatch):
    """None of some millions is so far out; here all are, on both sides."""
    odd = 2 * torch.cat((torch.arange(2000), (1 << 52) - 1 - torch.arange(2000))) + 1
    q = (odd - (1 << 52)).double() * 2.0**-53
    tail = torch.minimum(odd, (1 << 53) - odd).double() * 2.0**-53
    numbers = [normal_cpu._outer(*pair) for pair in zip(q.numpy(), tail.numpy(), strict=True)]
    assert (init._ppnd16(odd // 2).abs() > 7.0).all()
    assert same_bits(torch.tensor(numbers, dtype=torch.float64), init._ppnd16(odd // 2))


def test_more_rows_change_none():
    assert same_bits(whole_weight((100, 6))[:37], whole_weight((37, 6)))  # a vocabulary padded differently


def test_a_shard_per_stock_generator_is_not_a_slice():
    def stock(size: int) -> Tensor:
        shards = []
        for rank in range(size):
            generator = torch.Generator().manual_seed(2718 + rank)  # as Megatron seeds its ranks
            shards.append(torch.empty(64 // size, 8).normal_(generator=generator))
        return torch.cat(shards)

    assert not same_bits(stock(1), stock(2))
    assert not same_bits(stock(2), stock(4))


def test_the_bits_are_these_for_ever():
    values = normal((5, 7), [[(3, 4)], [(2, 6)]], seed=1234, name="decoder.layers.0.mlp.linear_fc1.weight", std=0.02)
    assert [value.hex() for value in values.flatten().tolist()] == [
        "-0x1.f4ccd00000000p-11",
        "-0x1.112c100000000p-8",
        "-0x1.f5fde80000000p-7",
        "-0x1.f794e20000000p-6",
    ]


def test_names_and_seeds_differ():
    tensors = [whole_weight((64, 64))]
    tensors += [whole_weight((64, 64), seed=s) for s in (0, 2, 1 << 32, (1 << 64) - 1)]
    tensors += [whole_weight((64, 64), name=n) for n in ("v", "")]
    stacked = torch.stack([t.flatten() for t in tensors])
    assert (torch.corrcoef(stacked) - torch.eye(len(tensors))).abs().max() < 5 / 64


def test_seeds_and_ranges_out_of_bounds_are_refused():
    for seed in (-1, 1 << 64):
        with pytest.raises(ValueError, match="seed"):
            whole_weight((2,), seed=seed)
    for ranges in ([[(0, 3)]], [[(-1, 1)]], [[(1, 0)]], []):
        with pytest.raises(ValueError, match="range"):
            normal((2,), ranges, seed=1, name="w", std=1.0)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_types_are_rounded_from_fp32(dtype):
    assert same_bits(whole_weight((33, 5), dtype=dtype), whole_weight((33, 5)).to(dtype))


def test_mean_and_std():
    assert torch.allclose(whole_weight((100, 10), mean=3.0, std=0.5), whole_weight((100, 10)) * 0.5 + 3, atol=1e-6)


def test_the_numbers_are_normal():
    x = whole_weight((512, 512)).double()
    n = x.numel()
    assert abs(x.mean()) < 4 / math.sqrt(n)
    assert abs(x.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 4 * math.sqrt(96 / n)
    for a, b in ((x[:, 1:], x[:, :-1]), (x[1:], x[:-1]), (x[:, 2:], x[:, :-2]), (x[:, ::2], x[:, 1::2])):
        assert abs((a * b).mean()) < 4 / math.sqrt(a.numel())
        assert abs((a**2 * b**2).mean() - 1) < 4 * math.sqrt(8 / a.numel())
    # Kolmogorov-Smirnov, the 1 % limit
    probability = torch.special.ndtr(x.flatten().sort()[0])
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    assert max((probability - steps[:-1]).max(), (steps[1:] - probability).max()) < 1.628 / math.sqrt(n)


@pytest.mark.parametrize(
    "counter, key, words",
    (  # kat_vectors of Random123
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ),
)
def test_philox_gives_the_published_words(counter, key, words):
    result = philox4x32([torch.tensor([word]) for word in counter], key)
    assert tuple(word.item() for word in result) == words


def test_the_quantile_is_accurate_from_end_to_end():
    generator = torch.Generator().manual_seed(0)
    last = (1 << 52) - 1
    low = torch.arange(4096)
    bits = torch.cat((low, last - low, torch.randint(0, last, (1 << 16,), generator=generator)))
    bits = torch.cat((bits, torch.randint(0, 1 << 30, (4096,), generator=generator)))[None]
    actual, u = init._ppnd16(bits), (2 * bits + 1).double() * 2.0**-53
    assert torch.allclose(actual, torch.special.ndtri(u), rtol=4e-15, atol=1e-15)
    assert same_bits(init._ppnd16(last - bits), -actual)


def test_the_quantiles_bits_are_the_recorded_ones():
    """Both forms share the definition, so that no comparison of them sees it change."""
    last = (1 << 52) - 1
    bits = torch.cat((torch.arange(4096), last - torch.arange(4096), torch.arange(1 << 16) * ((1 << 36) + 12345)))
    recorded = "a2218d656bd4a145721fbc2dbd84a8e62537dc6026ff5161e92de40e7685c6af"
    assert hashlib.sha256(init._ppnd16(bits).numpy().tobytes()).hexdigest() == recorded


# --- a model ---


def parameter(*shape: int, dim: int | None = None) -> nn.Parameter:
    made = nn.Parameter(torch.full(shape, math.nan))
    made.tensor_model_parallel, made.partition_dim = dim is not None, -1 if dim is None else dim
    return made


class Holder(nn.Module):
    """A module with these parameters and modules."""

    def __init__(self, **members) -> None:
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)


# A layer's parameters: the whole shape, and the dimension that the ranks split.
LAYER = {
    "input_layernorm.weight": ((HIDDEN,), None),
    "input_layernorm.bias": ((HIDDEN,), None),
    "self_attention.linear_qkv.weight": (((HEADS + 2 * GROUPS) * HEAD, HIDDEN), 0),
    "self_attention.linear_qkv.bias": (((HEADS + 2 * GROUPS) * HEAD,), 0),
    "self_attention.linear_proj.weight": ((HIDDEN, HEADS * HEAD), 1),
    "self_attention.linear_proj.bias": ((HIDDEN,), None),
    "self_attention.q_layernorm.weight": ((HEAD,), None),
    "self_attention.k_layernorm.weight": ((HEAD,), None),
    "mlp.linear_fc1.weight": ((2 * FFN, HIDDEN), 0),
    "mlp.linear_fc1.layer_norm_weight": ((HIDDEN,), None),
    "mlp.linear_fc2.weight": ((HIDDEN, FFN), 1),
}


def layer(number: int) -> Holder:
    made = Holder(layer_number=number + 1, self_attention=Holder(), mlp=Holder())
    for name, (shape, dim) in LAYER.items():
        path, _, last = name.rpartition(".")
        if path not in dict(made.named_modules()):
            made.get_submodule(path.rpartition(".")[0]).add_module(path.rpartition(".")[2], Holder())
        setattr(made.get_submodule(path), last, parameter(*shape, dim=dim))
    return made


def model(**settings) -> Holder:
    """A GPTModel's names, shapes and attributes."""
    made = Holder(decoder=Holder(layers=nn.ModuleList(map(layer, range(LAYERS)))))
    made.embedding = Holder(word_embeddings=Holder(weight=parameter(VOCAB, HIDDEN, dim=0)))
    made.decoder.final_layernorm = Holder(weight=parameter(HIDDEN))
    made.output_layer = Holder(weight=parameter(VOCAB, HIDDEN, dim=0))
    made.share_embeddings_and_output_weights = False
    methods = {f"{name}init_method": partial(nn.init.normal_, mean=0.0, std=STD) for name in ("", "embedding_")}
    output = partial(nn.init.normal_, mean=0.0, std=STD / math.sqrt(2 * LAYERS))
    made.config = SimpleNamespace(
        **{"gated_linear_unit": True, "output_layer_init_method": output} | methods | settings
    )
    return made


@pytest.fixture
def as_rank(monkeypatch):
    from megatron.core import parallel_state

    def become(rank: int, size: int) -> None:
        monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: size)

    become(0, 1)
    return become


def initialised(made: Holder) -> dict[str, Tensor]:
    assert initialise([made], seed=5) == [made]
    return {name: p.detach() for name, p in init.canonical_parameters(made)}


def test_values(as_rank):
    values = initialised(model())
    for name, value in values.items():
        if name.endswith("norm.weight") or name.endswith("layer_norm_weight"):
            assert (value == 1).all(), name
        elif name.endswith("bias"):
            assert (value == 0).all(), name
        else:
            std = STD / math.sqrt(8) if "linear_proj" in name or "linear_fc2" in name else STD
            assert 0.8 * std < value.std() < 1.2 * std, name
    weights = [v for n, v in values.items() if v.dim() == 2]
    assert len({tuple(w.flatten()[:4].tolist()) for w in weights}) == len(weights)


def test_zero_centred_norms_start_at_zero(as_rank):
    values = initialised(model(layernorm_zero_centered_gamma=True))
    assert (values["decoder.final_layernorm.weight"] == 0).all()


def test_mup_starts_the_output_layer_like_the_embedding(as_rank):
    values = initialised(model(use_mup=True, embedding_init_method=partial(nn.init.normal_, std=1.0)))
    assert values["output_layer.weight"].std() > 0.8
    assert values["decoder.layers.0.mlp.linear_fc1.weight"].std() < 0.1


def test_parameters_without_a_rule_are_named_and_nothing_is_changed(as_rank):
    made = model()
    made.decoder.layers[2].mlp.gate = Holder(weight=parameter(4, HIDDEN))
    made.embedding.tokentype_embeddings = Holder(weight=parameter(8, HIDDEN))
    with pytest.raises(ConfigError) as refused:
        initialise([made], seed=5)
    for name in ("decoder.layers.2.mlp.gate.weight", "embedding.tokentype_embeddings.weight"):
        assert name in str(refused.value)
    assert all(p.isnan().all() for p in made.parameters())


def test_a_weight_that_is_not_split_as_expected_is_refused(as_rank):
    as_rank(1, 2)
    made = model()
    made.decoder.layers[1].mlp.linear_fc2.weight.partition_dim = 0
    made.decoder.layers[3].self_attention.linear_qkv.weight.tensor_model_parallel = False
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.linear_fc2.*\n.*layers\.3\.self_attention\.linear_qkv"):
        initialise([made], seed=5)


def test_a_weight_without_memory_is_refused(as_rank):
    with pytest.raises(ConfigError, match=r"embeddings\.weight: has no memory"):
        initialise([model().to("meta")], seed=5)


@pytest.mark.parametrize("method", (nn.init.xavier_uniform_, partial(nn.init.normal_, mean=1.0, std=1.0)))
def test_other_distributions_are_refused(as_rank, method):
    with pytest.raises(ConfigError, match=r"model\.init_method"):
        initialise([model(init_method=method)], seed=5)


NORMED = ("self_attention.linear_qkv.", "mlp.linear_fc1.")  # linear layers with a norm in front


@pytest.mark.parametrize(
    "name",
    (
        *(f"{layer}{kind}" for layer in NORMED for kind in ("bias", "layer_norm_bias")),
        "self_attention.linear_proj.bias",
        "mlp.linear_fc2.bias",
    ),
)
def test_there_is_one_rule_for_biases_of_transformer_engines_layers(name):
    # Its modules keep Megatron's names; the norm in front of a linear layer is part of the layer.
    rules = [rule for rule in init.RULES if re.fullmatch(rule.name, f"decoder.layers.11.{name}")]
    assert [rule.value for rule in rules] == ["zeros"]


LAST = (1 << 52) - 1


@pytest.fixture(scope="module")
def drawn_bits():
    drawn = torch.randint(0, LAST, (1 << 15,), generator=torch.Generator().manual_seed(0))
    return torch.cat((torch.arange(512), LAST - torch.arange(512), drawn))[None]


def _exact(bits):
    return (2 * bits + 1).double() * 2.0**-53


def test_values_are_those_of_the_formulas(drawn_bits):
    """As Megatron's mixer computes them, in fp64 and with a library's functions."""
    u = _exact(drawn_bits)
    dt = torch.exp(u * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
    expected = {
        mamba.conv: u - 0.5,
        mamba.a_log: torch.log(1.0 + 15.0 * u),
        mamba.dt_bias: dt + torch.log(-torch.expm1(-dt)),
    }
    for function, values in expected.items():
        torch.testing.assert_close(function(drawn_bits), values, rtol=2e-15, atol=2e-15)


def test_softplus_of_the_bias_is_a_step(drawn_bits):
    steps = torch.nn.functional.softplus(mamba.dt_bias(drawn_bits))
    assert 0.001 * (1 - 1e-12) <= steps.min() < 0.0011
    assert 0.09 < steps.max() <= 0.1 * (1 + 1e-12)


def test_the_exponential_is_accurate():
    x = -torch.rand(1 << 14, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 20.0
    torch.testing.assert_close(mamba._exp(x), torch.exp(x), rtol=2e-15, atol=0.0)


def test_mambas_bits_are_these_for_ever():
    drawn = {
        function.__name__: init.sample((3,), [[(0, 3)]], function, seed=1234, name="decoder.layers.0.mixer.A_log")
        for function in (mamba.conv, mamba.a_log, mamba.dt_bias)
    }
    assert {name: [value.hex() for value in values.tolist()] for name, values in drawn.items()} == BITS


BITS = {
    "conv": ["0x1.b005800000000p-2", "-0x1.1efc1c0000000p-2", "0x1.5415060000000p-2"],
    "a_log": ["0x1.5928740000000p+1", "0x1.752ca60000000p+0", "0x1.4cf86c0000000p+1"],
    "dt_bias": ["-0x1.5047180000000p+1", "-0x1.793e640000000p+2", "-0x1.86babe0000000p+1"],
}


@pytest.mark.parametrize("size", (2, 4))
def test_segments_of_unlike_sizes_are_split_each_on_its_own(size):
    """x, B and C of a convolution's channels."""
    sizes = (16, 8, 4)
    whole = init.sample((28, 1, 4), [[(0, 28)], [(0, 1)], [(0, 4)]], mamba.conv, seed=1, name="w")
    x, b, c = whole.split(sizes)
    for rank in range(size):
        shape, ranges = init.place((28 // size, 1, 4), 0, rank, size, [n // size for n in sizes])
        assert shape == [28, 1, 4]
        local = init.sample(shape, ranges, mamba.conv, seed=1, name="w")
        assert same_bits(local, torch.cat([part.chunk(size)[rank] for part in (x, b, c)]))


def test_segments_that_are_not_the_rows_are_refused():
    with pytest.raises(ValueError, match=r"7 rows are not segments of \[4, 2\]"):
        init.place((7, 2), 0, 0, 1, (4, 2))
