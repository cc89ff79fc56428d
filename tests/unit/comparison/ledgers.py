# SPDX-License-Identifier: Apache-2.0
"""Ledgers with digests and traces, whole or with one thing changed."""

from dataclasses import replace
from pathlib import Path

import typer
from typer.testing import CliRunner

from tests import ledgers
from tp_invariant_recipes.cli.ledgers import compare as compare_command
from tp_invariant_recipes.ledger.digests import Parameter, Traced, tensor_digest
from tp_invariant_recipes.ledger.reader import Ledger
from tp_invariant_recipes.ledger.record import Header, StepRecord

STEPS = 5
LAYERS = 2
PARTS = (
    "self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight", "mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
)  # fmt: skip
NAMES = (
    "embedding.word_embeddings.weight",
    *(f"decoder.layers.{layer}.{part}" for layer in range(LAYERS) for part in PARTS),
    "decoder.final_layernorm.weight",
)
FC1 = "decoder.layers.1.mlp.linear_fc1"
FC2 = "decoder.layers.0.mlp.linear_fc2"
PARAMETERS = tuple(Parameter(name, (8, 16), "float32", "bfloat16") for name in NAMES)
HEADER = Header(identity={"rng.seed": 1234}, parameters=PARAMETERS)  # no master weights; their steps have no moments

# Modules in the order in which a forward pass enters them; a container's children come before its output.
LAYER = (
    ("self_attention", ("input_layernorm", "self_attention.linear_qkv", "self_attention.core_attention")),
    ("mlp", ("pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2")),
)


def value(*what: object, dtype: str = "bfloat16", shape: tuple[int, ...] = (4, 2, 8)) -> str:
    """A digest that depends on all of `what`."""
    return tensor_digest((hash(what), len(what)), dtype, shape)


def forward_modules() -> list[tuple[str, str]]:
    """(module, tensor) in the order of execution."""
    entries = [("embedding.word_embeddings", "input"), ("embedding.word_embeddings", "output")]
    for layer in range(LAYERS):
        name = f"decoder.layers.{layer}"
        entries.append((name, "input"))
        for _, modules in LAYER:
            entries += [(f"{name}.{module}", tensor) for module in modules for tensor in ("input", "output")]
        entries.append((name, "output"))
    return [*entries, ("output_layer", "input"), ("output_layer", "output")]


def trace(step: int) -> tuple[Traced, ...]:
    forward = [("forward", module, tensor) for module, tensor in forward_modules()]
    flipped = {"input": "output", "output": "input"}
    backward = [("backward", module, flipped[tensor]) for module, tensor in reversed(forward_modules())]
    return tuple(Traced(*key, "bfloat16", (4, 2, 8), value(step, *key)) for key in forward + backward)


def record(step: int, digested: bool = True, traced: bool = False, **changes) -> StepRecord:
    values = {}
    if digested:
        values["gradients"] = {name: value(step, "gradient", name) for name in NAMES}
        values["weights"] = {name: value(step, "weight", name) for name in NAMES}
    if traced:
        values["trace"] = trace(step)
    return ledgers.record(step, **{**values, **changes})


def ledger(name="b", header=HEADER, steps=STEPS, digested=lambda step: True, traced=(), at=3, **changes) -> Ledger:
    """A ledger in memory; `changes` are those of step `at`."""
    records = (
        record(step, digested(step), step in traced, **(changes if step == at else {})) for step in range(1, steps + 1)
    )
    return Ledger(header, tuple(records), Path(name) / "ledger.jsonl", torn=False)


A = ledger("a")


def with_other(step: int, **names: str) -> dict[str, dict[str, str]]:
    """The changes of a step where the digests of these parameters are others: kind → parameter."""
    good = record(step)
    return {kind: getattr(good, kind) | {name: value("other", name)} for kind, name in names.items()}


def with_trace(step: int, *names: str, digest: str | None = "0" * 32) -> dict[str, tuple[Traced, ...]]:
    entries = [
        replace(entry, digest=digest) if f"{entry.direction}/{entry.module}/{entry.tensor}" in names else entry
        for entry in trace(step)
    ]
    assert entries != list(trace(step))
    return {"trace": tuple(entries)}


LOSS, OTHER = "f32:40c80000", "f32:40c80001"
EVERY_SECOND = {
    2: {"validation/0:8": LOSS},
    4: {"validation/8:16": LOSS},
    5: {"final_validation/16:24": LOSS, "test/0:8": LOSS},
}


def evaluated(name, evaluations):
    steps = (replace(record(step), evaluations=evaluations.get(step, {})) for step in range(1, STEPS + 1))
    return Ledger(HEADER, tuple(steps), Path(name) / "ledger.jsonl", torn=False)


NONE = lambda step: False  # noqa: E731
NO_STATE = "Clipped gradients and optimizer moments are compared at 0 of 5 steps."
BARE = replace(HEADER, parameters=())


def grown(*starts: tuple[str, str, int]) -> Ledger:
    """A ledger in which digests (kind, parameter) are others from a step on."""
    records = []
    for step in range(1, STEPS + 1):
        good = record(step)
        changes = {kind: dict(getattr(good, kind)) for kind in ("gradients", "weights")}
        for kind, name, first in starts:
            if step >= first:
                changes[kind][name] = value("other", kind, name)
        records.append(replace(good, **changes))
    return Ledger(HEADER, tuple(records), Path("b/ledger.jsonl"), torn=False)


def tpi_compare(*arguments: object):
    """`tpi compare` in this process."""
    app = typer.Typer()
    app.command()(compare_command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], terminal_width=200)
