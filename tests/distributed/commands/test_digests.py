# SPDX-License-Identifier: Apache-2.0
"""Digests of gradients, weights and moments, end to end: one for every layout, those of gathered tensors, replicas
checked.
"""

import math
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.distributed.small_models import DENSE, small
from tp_invariant_recipes.kernels.digest import lanes
from tp_invariant_recipes.kernels.launch import TensorPart
from tp_invariant_recipes.ledger.bits import bits_float
from tp_invariant_recipes.ledger.digests import tensor_digest
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.ledger.schema import DIGESTED

SMALL = f"{DENSE} gbs=1 iters=2 numerics=stock"
STAGES = "pp=2 gbs=2 model.num_layers=2"
NORM = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


STATES = ("fp32_param", "exp_avg", "exp_avg_sq")  # in a checkpoint


@pytest.fixture
def trained(scenario):
    """Overrides, and a fault to plant -> the ledger of a small run with them."""

    def train(*overrides, before=None):
        run = scenario(SMALL, *overrides)
        run = run.planted(before) if before else run
        assert all(math.isfinite(bits_float(step.loss)) for step in run.ledger())
        return read(run.run)

    return train


def differing(a, b, kind):
    """Step → parameters with another digest."""
    pairs = [(x.step, getattr(x, kind), getattr(y, kind)) for x, y in zip(a.steps, b.steps, strict=True)]
    return {step: [n for n, d in x.items() if y[n] != d] for step, x, y in pairs if x is not None}


def digest_of(tensor):
    table = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.view(1, -1)
    return tensor_digest(
        lanes([TensorPart(table, 0, 0)])[0].tolist(), str(tensor.dtype).removeprefix("torch."), tensor.shape
    )


LAYOUTS = (
    "tp=2 pp=2 gbs=2 model.num_layers=2",
    "tp=2 sp=false",
    "tp=2 dp=2 gbs=2 model.share_embeddings_and_output_weights=false",
)


@pytest.mark.release
@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_are_those_of_the_tensors_in_a_checkpoint(scenario, layout):
    """Megatron gathers the checkpoint by its own code; here it is read whole, by torch's."""
    run = scenario(SMALL, layout, "save=2 optimizer.use_distributed_optimizer=false")
    header, last = run.header(), run.ledger()[-1]
    folder = run.run / "checkpoints/iter_0000002"
    described = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    saved = {
        key: torch.empty(m.size, dtype=m.properties.dtype)
        for key, m in described.items()
        if hasattr(m, "properties") and m.size
    }
    dcp.load(saved, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    kept: dict[str, dict[str, str]] = {state: {} for state in ("", *STATES)}
    for key, tensor in saved.items():
        state = next((state for state in STATES if key.startswith(f"optimizer.state.{state}.")), "")
        key, expected = key.removeprefix(f"optimizer.state.{state}."), kept[state]
        if re.match(r"decoder\.layers\.(?!\d)", key):  # all layers in one
            named = {key.replace("layers.", f"layers.{n}.", 1): layer for n, layer in enumerate(tensor)}
        else:
            named = {key: tensor}
        expected |= {name: digest_of(value) for name, value in named.items()}
    assert last.weights is None  # which are the master weights rounded
    assert {p.name for p in header.parameters} == set(kept[""])
    assert last.masters == kept["fp32_param"]
    assert {n: d for n, d in last.moments.items() if not n.startswith("step/")} == {
        f"{state}/{name}": digest for state in STATES[1:] for name, digest in kept[state].items()
    }
    dtypes = {(p.gradient, p.weight, p.master) for p in header.parameters}
    assert dtypes == {("float32", "bfloat16", "float32")}


def _at_step(step, rank, change):
    """Call change(model) on one rank just after the optimizer's step `step`."""

    def plant():
        import torch.distributed as dist

        from tp_invariant_recipes.observe.digests.callback import Digests

        original = Digests.on_train_step_end

        def on_train_step_end(self, context):
            if context.state.train_state.step + 1 == step and dist.get_rank() == rank:
                change(context.model[0])
            original(self, context)

        Digests.on_train_step_end = on_train_step_end

    return plant


def _flip(name, bit, *, master=False):
    def change(model):
        parameter = next(p for n, p in model.named_parameters() if n.endswith(name))
        tensor = parameter.main_param if master else parameter
        tensor.data.view(torch.int32 if master else torch.int16).flatten()[-1] ^= 1 << bit

    return change


def test_a_replica_that_diverges_is_named_with_its_rank(tpi):
    flip = _flip("layers.0.input_layernorm.weight", 3, master=True)
    done = tpi("train", *SMALL.split(), "tp=4", "iters=1", "run.dir=run", before=_at_step(1, 2, flip), status=0)
    assert "warning: ranks disagree on a tensor at step 1" in done.stderr
    ledger = read(tpi.folder / "run")
    assert ledger.steps[0].diverged == (("masters", NORM, ((0, 1, 3), (2,))),)


def test_a_graph_of_the_whole_step_has_the_same_digests(scenario):
    """A replay calls no hook of a forward, and the routers of experts update their biases before the optimizer's step.
    Kernels that start after that, as without the callback's knowledge of the graph, have the next step's biases.
    """

    def replayed(*, known):
        def plant():
            from tp_invariant_recipes.observe.digests.callback import Digests

            original, Digests._on_forward = Digests.on_train_start, lambda *_: None

            def on_train_start(self, context):
                original(self, context)
                self._whole_steps = known

            Digests.on_train_start = on_train_start

        return read_ledger(run.planted(plant))

    def read_ledger(planted):
        planted.ledger()
        return read(planted.run)

    run = scenario(small("moonlight_toy"), "gbs=1 iters=3 ledger.state_digests=2")
    seen = read_ledger(run)
    assert seen.steps == replayed(known=True).steps
    late = differing(seen, replayed(known=False), "weights")
    assert [bool(late[step]) for step in (1, 2, 3)] == [True, True, False]
    assert all(name.endswith("expert_bias") for name in late[1])


@pytest.mark.release
def test_a_lost_shard_is_refused(tpi):
    def lose():
        import torch.distributed as dist

        from tp_invariant_recipes.observe.shards import Shards

        original = Shards.held
        Shards.held = lambda self, stored, **kind: original(self, stored, **kind)[dist.get_rank() == 1 :]

    refused = tpi("train", *SMALL.split(), "tp=2", "run.dir=run", before=lose, status=2)
    assert re.search(
        r"digests of weights are not possible:\s+\S+: the ranks' parts do not cover its shape", refused.stderr
    )
    assert "ledger.digests=0" in refused.stderr


@pytest.mark.release
def test_every_nth_step_or_none(trained):
    sparse = trained("iters=7 ledger.digests=2 ledger.state_digests=3")
    recorded = {kind: [getattr(step, kind) is not None for step in sparse.steps] for kind in DIGESTED}
    assert recorded == {
        "gradients": [False, True, False, True, False, True, False],
        "clipped": [False, False, False, False, False, True, False],
        "moments": [False, False, True, False, False, True, True],
        "masters": [False, True, True, True, False, True, True],
        "weights": [False] * 7,
    }
    none = trained("iters=7 ledger.digests=0")
    assert none.header.parameters == ()
    assert all(step.weights is None for step in none.steps)
    assert [step.loss for step in none.steps] == [step.loss for step in sparse.steps]


@pytest.mark.release  # of tree: test_bench.py, a mode with digests
def test_digests_change_nothing_that_stock_trains(trained):
    with_, without = (trained(f"tp=2 iters=3 ledger.digests={n}") for n in (1, 0))
    assert [(s.loss, s.grad_norm) for s in with_.steps] == [(s.loss, s.grad_norm) for s in without.steps]
