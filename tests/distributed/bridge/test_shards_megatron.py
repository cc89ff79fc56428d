"""Where a rank's part of a parameter lies, by Megatron's own descriptions: all ranks' parts cover it exactly once."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.kernels.digest import lanes
from tp_invariant_recipes.kernels.tensor_part import TensorPart
from tp_invariant_recipes.observe.shards import Shards, covers, whole_name

pytestmark = pytest.mark.usefixtures("bridge")


class Model(torch.nn.Module):
    """Parameters, and a function that describes them as Megatron would."""

    def __init__(self, tensors, describe):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, torch.nn.Parameter(tensor))
        self.describe = describe

    def sharded_state_dict(self):
        return {name: self.describe(name, parameter) for name, parameter in self.named_parameters()}


def held_lanes(models):
    """Name → shape and lanes, summed over models: each is one rank's."""
    sums = {}
    for model in models:
        for part in Shards([model]).weights():
            lane = lanes([part])[0]
            shape, before, places = sums.get(part.name, (part.shape, 0, []))
            sums[part.name] = (shape, before + lane, [*places, part.place])
    assert all(covers(places, shape) for shape, _, places in sums.values())
    return {name: (shape, lane.tolist()) for name, (shape, lane, _) in sums.items()}


def table(tensor):
    return lanes([TensorPart(tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.view(1, -1), 0, 0)])[
        0
    ].tolist()


@given(
    t=st.sampled_from((1, 2, 4)),
    dim=st.integers(0, 1),
    axes=st.integers(0, 2),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    middle=st.integers(0, 3),
)
def test_column_and_row_parallel_tensors_with_prepended_axes(t, dim, axes, shape, middle):
    """middle: size of a dimension between the first and the last (Mamba's convolution); 0: there is none."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    sizes = (shape[0] * 4, *((middle,) if middle else ()), shape[1] * 4)
    last = len(sizes) - 1
    full = torch.randn(sizes)
    along = last if dim else 0
    prepended = [(axis, 2, 5) for axis in range(axes)]

    def rank(r):
        part = full.chunk(t, along)[r].contiguous()

        def describe(name, data):
            return ShardedTensor.from_rank_offsets(
                "decoder.layers.w", data, *prepended, (along + axes, r, t), prepend_axis_num=axes
            )

        return Model({"w": part}, describe)

    name = whole_name("decoder.layers.w", (2,) * axes)
    assert held_lanes(map(rank, range(t))) == {name: (sizes, table(full))}


@given(t=st.sampled_from((1, 2, 4)), rows=st.integers(1, 3), columns=st.integers(1, 5))
def test_gated_projections(t, rows, columns):
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    gate, up = torch.randn(2, rows * 4, columns)

    def rank(r):
        part = torch.cat([gate.chunk(t)[r], up.chunk(t)[r]])

        def describe(name, data):
            sharded = ShardedTensor.from_rank_offsets("fc1", data, (0, r, t))
            return apply_swiglu_sharded_factory(sharded, ())

        return Model({"w": part}, describe)

    full = torch.cat([gate, up])
    assert held_lanes(map(rank, range(t))) == {"fc1": (tuple(full.shape), table(full))}


@given(
    t=st.sampled_from((1, 2, 4)), sizes=st.lists(st.integers(1, 3), min_size=2, max_size=5), columns=st.integers(1, 5)
)
def test_mamba_sections(t, sizes, columns):
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.ssm.mamba_mixer import _split_tensor_factory

    sections = [torch.randn(size * 4, columns) for size in sizes]
    names = [f"s{n}" for n in range(len(sections))]

    def rank(r):
        parts = [section.chunk(t)[r] for section in sections]

        def describe(name, data):
            sharded = ShardedTensor.from_rank_offsets("in_proj", data, (0, r, t))
            return _split_tensor_factory(sharded, [len(part) for part in parts], names, 0)

        return Model({"w": torch.cat(parts)}, describe)

    wanted = {f"in_proj.{name}": (tuple(s.shape), table(s)) for name, s in zip(names, sections, strict=True)}
    assert held_lanes(map(rank, range(t))) == wanted


def test_a_tied_weight_counts_once():
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    model = Model({"w": torch.randn(4, 3)}, None)
    sharded = ShardedTensor.from_rank_offsets("w", model.w)
    model.sharded_state_dict = lambda: {"embedding": sharded, "output": dataclasses.replace(sharded)}
    assert len(Shards([model]).weights()) == 1


def test_what_cannot_be_placed_is_listed():
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    tensors = {name: torch.randn(4, 4) for name in ("copied", "forgotten", "partly")}

    def describe(name, data):
        if name == "forgotten":
            return None
        return ShardedTensor.from_rank_offsets(name, data.clone() if name == "copied" else data[:2])

    with pytest.raises(RunError) as caught:
        Shards([Model(tensors, describe)])
    message = str(caught.value)
    assert "copied: not a view of any tensor of the model" in message
    assert "forgotten: 0 of 16 elements are placed" in message
    assert "partly: 8 of 16 elements are placed" in message
    assert "ledger.digests=0" in message


def test_gradients_are_read_where_megatron_keeps_them():
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    model = Model(
        {"w": torch.randn(6, 4), "frozen": torch.randn(3)},
        lambda name, data: ShardedTensor.from_rank_offsets(name, data),
    )
    model.w.main_grad = torch.randn(6, 4, dtype=torch.float64)
    (held,) = Shards([model]).gradients(optimizer=None)
    assert (held.name, held.shape, math.prod(held.values.shape)) == ("w", (6, 4), 24)
    assert held.values.data_ptr() == model.w.main_grad.data_ptr()
    before = Shards([model]).memory()
    model.w.main_grad = model.w.main_grad.clone()
    assert Shards([model]).memory() != before
