# SPDX-License-Identifier: Apache-2.0
"""Where a rank's part of a parameter lies, by Megatron's own descriptions.

That all ranks' parts of a model's layers cover them exactly once, ledgers of layouts show, whose digests agree.
"""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.distributed.ranks import on_ranks
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.kernels.digest import lanes
from tp_invariant_recipes.kernels.launch import TensorPart
from tp_invariant_recipes.observe.digests.sums import covers
from tp_invariant_recipes.observe.shards import Shards, whole_name

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


@given(
    t=st.sampled_from((1, 2, 4)),
    dim=st.integers(0, 1),
    axes=st.integers(0, 2),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    middle=st.integers(0, 3),
)
def test_parts_of_a_tensor_of_several_dimensions_cover_it(t, dim, axes, shape, middle):
    """middle: size of a dimension between the first and the last (Mamba's convolution); 0: there is none."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    sizes = (shape[0] * 4, *((middle,) if middle else ()), shape[1] * 4)
    full = torch.randn(sizes)
    along = (len(sizes) - 1) * dim
    prepended = [(axis, 2, 5) for axis in range(axes)]

    def held_by(r, part):
        def describe(name, data):
            place = (along + axes, r, t)
            return ShardedTensor.from_rank_offsets("decoder.layers.w", data, *prepended, place, prepend_axis_num=axes)

        (weight,) = Shards([Model({"w": part.contiguous()}, describe)]).weights()
        return weight

    held = [held_by(r, part) for r, part in enumerate(full.chunk(t, along))]
    assert {weight.name for weight in held} == {whole_name("decoder.layers.w", (2,) * axes)}
    assert covers([weight.place for weight in held], sizes)
    whole = lanes([TensorPart(full.reshape(-1, sizes[-1]), 0, 0)])[0]
    assert torch.equal(sum(lanes([weight])[0] for weight in held), whole)


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


def _diverged(mesh):
    """Of two replicas of a master weight: none wrong, one's copy, then its value too."""
    from tp_invariant_recipes.cpu_host import cpu
    from tp_invariant_recipes.observe.digests.merge import Merge, read_digests
    from tp_invariant_recipes.observe.digests.sums import Sums

    device = torch.device("cpu")
    values = torch.arange(12.0).view(3, 4)
    copy = values.bfloat16()
    with cpu.installed():
        sums = Sums("masters", [TensorPart(values, 0, 0, 1, copy, "weight", (3, 4))], device)
        merge, results = Merge([sums], device), []
        for wrong in ((), (copy,), (values,)):
            for tensor in wrong if mesh.rank == 1 else ():
                tensor[1, 1] += 1
            results.append(read_digests(merge([sums.started()])).diverged)
    return results


def test_replicas_and_copies_that_differ_name_their_ranks():
    none, copies, both = on_ranks(2, 2, _diverged)[0]
    assert none == ()
    assert copies == (("copies", "weight", ((1,),)),)
    assert both == (("masters", "weight", ((0,), (1,))),)
