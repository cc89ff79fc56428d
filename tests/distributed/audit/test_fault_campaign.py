# SPDX-License-Identifier: Apache-2.0
"""Faults that change bits of weights, master weights, moments or gradients: each is caught at its step, and named.

In `make test`: tests/distributed/commands/test_digests.py, a replica that diverges.

A row is a fault at step STEP: where in the step it happens, on which ranks, and what it does to the optimizer's
tensors of one parameter. Each is trained and compared with a sound run of the same configuration, beside which stands
a control: a fault that restores every bit before anything reads it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.distributed.small_models import small
from tp_invariant_recipes.comparison.compare import Verdict, compare
from tp_invariant_recipes.comparison.text import verdict_line
from tp_invariant_recipes.ledger.open import read

pytestmark = pytest.mark.release
STEP = 2
STEPS = ("seq=32", "iters=3", "gbs=2", "ledger.state_digests=1")
TINY = ("model.num_layers=1", "model.vocab_size=512")
DENSE = ("qwen3_toy", *STEPS, *TINY)
WORDS = {2: torch.int16, 4: torch.int32}

# Configuration -> overrides.
RUNS = {
    "bf16": (*DENSE, "tp=1"),
    "fp32": (*DENSE, "tp=1", "precision=fp32"),
    "tp": (*DENSE, "tp=2"),
    "tp fp32": (*DENSE, "tp=2", "precision=fp32"),
    "pp": ("qwen3_toy", *STEPS, "pp=2"),
    "dp": (*DENSE, "dp=2", "optimizer.use_distributed_optimizer=false"),
    "distributed": (*DENSE, "dp=2", "optimizer.use_distributed_optimizer=true"),
    "distributed fp32": (*DENSE, "dp=2", "optimizer.use_distributed_optimizer=true", "precision=fp32"),
    "experts": (
        "qwen3_moe_toy", *STEPS, *TINY, "model.hidden_size=64", "model.moe_ffn_hidden_size=64", "tp=2", "ep=2",
    ),
    "mamba": (*small("nemotron3_nano_toy").split(), "iters=3", "ledger.state_digests=1", "tp=2"),
}  # fmt: skip

EMBEDDING, QKV, FC1, FC2 = "embedding.word_embeddings.weight", "linear_qkv.weight", "linear_fc1.weight", "linear_fc2"
NORM, LAST = "linear_qkv.layer_norm_weight", "final_layernorm.weight"
EXPERT, ROUTER, IN_PROJ, A_LOG = "experts.3.linear_fc1", "router.weight", "mixer.in_proj", "mixer.A_log"


@dataclass
class ParameterState:
    """What a rank has of a parameter as the fault happens. slot: of its optimizer, None if it updates no part of it."""

    owner: Any
    slot: Any

    def flat(self, kind: str) -> torch.Tensor:
        """A flat view: of the whole weight, of the optimizer's own range of everything else."""
        if kind == "weight":
            return self.owner.data.view(-1)
        slot = self.slot
        if kind == "gradient":  # as it is in the buffer of gradients
            return self.owner.main_grad.view(-1)[slot.start : slot.start + slot.updated.numel()]
        tensor = {"master": slot.updated, "read": slot.gradient}.get(kind)
        return (slot.state[kind] if tensor is None else tensor).data.view(-1)


Change = Callable[[ParameterState], None]


def flip(kind: str, bit: int, at: int = -1) -> Change:
    def change(held: ParameterState) -> None:
        values = held.flat(kind)
        values.view(WORDS[values.element_size()])[at] ^= 1 << bit if bit < 31 else -(1 << 31)

    return change


def swap(kind: str) -> Change:
    """Two elements that differ."""

    def change(held: ParameterState) -> None:
        values = held.flat(kind)
        other = int((values != values[0]).nonzero()[-1])
        values[[0, other]] = values[[other, 0]].clone()

    return change


def group(**values: Any) -> Change:
    """Other hyperparameters of the optimizer at this step."""

    def change(held: ParameterState) -> None:
        for param_group in held.slot.wrapped.param_groups:
            param_group.update(values)

    return change


def untouched(held: ParameterState) -> None:
    """The optimizer passes over the parameter."""
    held.slot.updated.grad = None


def nothing(held: ParameterState) -> None:
    flip("gradient", 0)(held)
    flip("gradient", 0)(held)


# Where in the step: before the digest of the gradients; before they are clipped; before the wrapped optimizer reads
# them; after the step.
EARLY, CLIP, READ, AFTER = "before the digest", "before clipping", "as read", "after the step"


@dataclass(frozen=True)
class Fault:
    run: str
    where: str
    parameter: str
    change: Change
    kinds: tuple[str, ...]  # of the first difference
    ranks: tuple[int, ...] = (0,)


def _flips(run: str, parameter: str, *ranks: int, full: bool = True) -> list[Fault]:
    """One bit, low and high, of everything that a run has of a parameter."""
    bits = (0, 22) if full else (0,)
    rows = (
        (EARLY, "gradient", "gradients"), (CLIP, "gradient", "clipped"), (READ, "read", "clipped"),
        (AFTER, "master", "weights" if "fp32" in run else "masters"), (AFTER, "exp_avg", "moments"),
        (AFTER, "exp_avg_sq", "moments"),
    )  # fmt: skip
    # In fp32 the owner updates the weight itself, which the other ranks hold too.
    also = ("replicas",) if run == "distributed fp32" else ()
    results = [
        Fault(run, where, parameter, flip(kind, bit), (expected, "grad_norm", *also), ranks or (0,))
        for where, kind, expected in rows
        for bit in ((3, *bits[1:]) if where == CLIP else bits)  # clipping can round a lower bit away
    ]
    if "fp32" not in run:
        results += [Fault(run, AFTER, parameter, flip("weight", bit), ("copies",), ranks or (0,)) for bit in (0, 6)]
    return results


REPLICA = ("replicas", "grad_norm")
UNOWNED = ("replicas", "copies")
FAULTS = (
    *_flips("bf16", FC1),
    *_flips("fp32", FC1),
    *_flips("tp", QKV, 1, full=False),
    *_flips("pp", LAST, 1, full=False),
    *_flips("distributed", FC2, 0, 1, full=False),
    *_flips("distributed fp32", EMBEDDING, 0, 1, full=False),
    *_flips("experts", EXPERT, 0, full=False),
    *_flips("mamba", IN_PROJ, 1, full=False),
    # One replica only.
    Fault("tp", EARLY, NORM, flip("gradient", 0), REPLICA, (1,)),
    Fault("tp", AFTER, NORM, flip("master", 0), REPLICA, (1,)),
    Fault("tp fp32", AFTER, NORM, flip("master", 0), REPLICA, (1,)),
    Fault("dp", EARLY, FC1, flip("gradient", 0), REPLICA, (1,)),
    Fault("dp", AFTER, FC1, flip("master", 0), REPLICA, (1,)),
    Fault("dp", AFTER, FC1, flip("weight", 0), ("copies",), (1,)),
    # A copy of what another rank's optimizer owns.
    Fault("distributed", AFTER, EMBEDDING, flip("weight", 0, -1), UNOWNED, (0,)),
    Fault("distributed", AFTER, EMBEDDING, flip("weight", 0, 0), UNOWNED, (1,)),
    Fault("experts", AFTER, ROUTER, flip("exp_avg", 0), REPLICA, (1,)),
    Fault("mamba", AFTER, A_LOG, flip("master", 0), ("weights", "masters", "replicas"), (1,)),
    # A zero that loses its sign.
    Fault("bf16", AFTER, EMBEDDING, flip("exp_avg", 31), ("moments",)),
    # Elements in other places.
    Fault("bf16", EARLY, FC1, swap("gradient"), ("gradients",)),
    Fault("bf16", AFTER, FC1, swap("master"), ("masters",)),
    # What goes wrong in software.
    Fault("tp", READ, QKV, group(lr=1.1e-3), ("masters",), (1,)),
    Fault("tp", READ, QKV, group(betas=(0.8, 0.95)), ("moments",), (1,)),
    Fault("bf16", READ, FC2, untouched, ("moments",)),
)


def planted(fault: Fault) -> Callable[[], None]:
    """What to do before the command: have the fault happen."""

    def plant() -> None:
        from contextlib import contextmanager

        from megatron.core.optimizer.optimizer import FP32Optimizer, MixedPrecisionOptimizer

        from tp_invariant_recipes.observe.digests.callback import Digests
        from tp_invariant_recipes.observe.optimizer_state import OptimizerState

        seen: dict[str, Any] = {}

        def happen(where: str) -> None:
            due = seen["step"] == STEP and where == fault.where and "done" not in seen
            if due and int(os.environ["RANK"]) in fault.ranks:
                seen["done"] = True
                parts = seen["digests"].plan.shards.parts
                owner = next(part.owner for part in parts if fault.parameter in part.name)
                slots = {id(slot.owner): slot for slot in OptimizerState(seen["context"].optimizer).slots}
                held = ParameterState(owner, slots.get(id(owner)))
                if held.slot is not None or fault.kinds == UNOWNED:
                    with torch.no_grad():
                        fault.change(held)

        start, end, around = Digests.on_train_step_start, Digests.on_train_step_end, Digests.around_optimizer_step

        def on_train_step_start(self, context):
            start(self, context)
            seen.update(context=context, digests=self, step=context.state.train_state.step + 1)

        def on_train_step_end(self, context):
            happen(AFTER)
            end(self, context)

        @contextmanager
        def around_optimizer_step(self):
            happen(EARLY)
            with around(self):
                happen(CLIP)
                yield

        Digests.on_train_step_start, Digests.on_train_step_end = on_train_step_start, on_train_step_end
        Digests.around_optimizer_step = around_optimizer_step
        for kind in (MixedPrecisionOptimizer, FP32Optimizer):

            def step_with_ready_grads(self, original=kind.step_with_ready_grads):
                happen(READ)
                return original(self)

            kind.step_with_ready_grads = step_with_ready_grads

    return plant


def compared(scenario, fault):
    """A sound run, and the same with the fault."""
    sound = scenario(*RUNS[fault.run])
    faulty = sound.planted(planted(fault))
    for item in (sound, faulty):
        item.ledger()
    return compare(read(sound.run), read(faulty.run))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.run} {fault.where} {fault.parameter}")
def test_a_fault_is_caught_at_its_step(scenario, fault):
    result = compared(scenario, fault)
    assert result.verdict is Verdict.DIFFERENT
    assert (result.first.step, result.first.kind in fault.kinds or result.first.name in fault.kinds) == (STEP, True), (
        verdict_line(result)
    )


@pytest.mark.parametrize("run", RUNS)
def test_a_control_is_identical(scenario, run):
    result = compared(scenario, Fault(run, EARLY, "", nothing, ()))
    assert result.verdict is Verdict.IDENTICAL, verdict_line(result)
