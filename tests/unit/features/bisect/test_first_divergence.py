# SPDX-License-Identifier: Apache-2.0
"""Of two traced runs that part: which module and operation it is said to be, and what is written out of it."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.ledgers import record
from tests.unit.comparison.ledgers import LOSS, evaluated
from tests.unit.comparison.ledgers import OTHER as OTHER_LOSS
from tp_invariant_recipes.comparison.compare import Comparison, Verdict, compare
from tp_invariant_recipes.comparison.magnitude import magnitude
from tp_invariant_recipes.comparison.text import remarks
from tp_invariant_recipes.errors import LedgerError
from tp_invariant_recipes.features.bisect import workflow as bisect
from tp_invariant_recipes.features.bisect.result import distances, module_of, operation, worth_dumping
from tp_invariant_recipes.ledger import dumps
from tp_invariant_recipes.ledger.digests import Parameter, Traced
from tp_invariant_recipes.ledger.reader import Ledger
from tp_invariant_recipes.ledger.record import Header

FC1 = "decoder.layers.0.mlp.linear_fc1"
NORM = "decoder.layers.0.pre_mlp_layernorm"
MODULES = (NORM, FC1, "output_layer")
# The norm's weight is saved as that of a fused layer; `bias` is of no module that is traced.
NAMES = (f"{FC1}.layer_norm_weight", f"{FC1}.weight", "bias", "output_layer.weight")
EQUAL, OTHER = "0" * 32, "1" * 32
LATER_RATE = "f64:3f33a92a30553262"


def entries() -> list[tuple[str, str, str]]:
    forward = [("forward", module, tensor) for module in MODULES for tensor in ("input", "output")]
    return [*forward, *(("backward", module, tensor) for _, module, tensor in forward[::-1])]


def traced_ledger(other: str | None = None, **changes) -> Ledger:
    """Two traced steps of which the second is another in one value, called as in a comparison, or in fields."""
    kind, _, name = (other or "").partition("/")
    records = []
    for step in (1, 2):
        last = step == 2
        trace = tuple(
            Traced(*key, "float32", (2, 3), OTHER if last and "/".join(key) == other else EQUAL) for key in entries()
        )
        digests = {
            recorded: {n: OTHER if last and (kind, name) == (recorded, n) else EQUAL for n in NAMES}
            for recorded in ("gradients", "weights")
        }
        records.append(record(step, **dict(trace=trace, **digests) | (changes if last else {})))
    header = Header(
        identity={"rng.seed": 1},
        parameters=tuple(Parameter(name, (2, 3), "float32", "float32") for name in NAMES),
        initial=dict.fromkeys(NAMES, EQUAL),
    )
    return Ledger(header, tuple(records), Path("run") / "ledger.jsonl", torn=False)


def parted(other: str | None = None, **changes) -> Comparison:
    return compare(traced_ledger(), traced_ledger(other, **changes))


RANKS = ((0,), (1,))


def unknown_input(name: str) -> Ledger:
    """A run that differs in an output, and whose input has no digest: a run cannot dump what has no place."""
    b = traced_ledger(name)
    trace = tuple(replace(t, digest=None) if t.name == f"forward/{FC1}/input" else t for t in b.steps[1].trace)
    return replace(b, steps=(b.steps[0], replace(b.steps[1], trace=trace)))


def called_twice(digest: str) -> Ledger:
    """Dumps have names of modules alone, so that a later call is not dumped."""
    run = traced_ledger()
    trace = run.steps[1].trace
    call = [t for t in trace if (t.direction, t.module) == ("forward", FC1)]
    call[-1] = replace(call[-1], digest=digest)
    return replace(run, steps=(run.steps[0], replace(run.steps[1], trace=(*trace, *call))))


def divergences() -> Iterator[tuple[str, Comparison]]:
    yield "none", parted()
    outputs = (f"forward/{FC1}/output", f"backward/{FC1}/output")
    weights = (f"gradients/{FC1}.weight", "gradients/bias", f"weights/{FC1}.weight")
    for name in (*outputs, f"forward/{FC1}/input", *weights, f"gradients/{FC1}.layer_norm_weight"):
        yield name, parted(name)
    for field, bits in (("loss", "f32:40c80001"), ("grad_norm", "f32:3fa00001"), ("learning_rate", LATER_RATE)):
        yield field, parted(**{field: bits})
    for name in (*outputs, *weights):
        kind, _, tensor = name.partition("/")
        # The optimizer then gives each replica another weight: the gradient comes first in the order of execution.
        later = () if kind == "weights" else (("weights", f"{FC1}.weight", RANKS),)
        yield f"replicas of {name}", parted(diverged=(*later, (kind, tensor, RANKS)))
    yield "replicas of an unknown tensor", parted(diverged=(("weights", "unknown", RANKS),))
    yield "an input without a digest", compare(traced_ledger(), unknown_input(outputs[0]))
    yield "an input without a digest in the first run", compare(unknown_input(outputs[0]), traced_ledger())
    yield "a later call", compare(called_twice(EQUAL), called_twice(OTHER))


def test_a_divergence_has_a_module_an_operation_and_what_it_was_computed_from(data_regression):
    """As divergences.yml has them; `--regen-all` writes it anew."""
    results = {}
    for title, comparison in divergences():
        first = comparison.first and f"{comparison.first.kind} {comparison.first.name}"
        names = {"module": module_of(comparison), "operation": operation(comparison)}
        results[title] = {"first": first, **names, "dumped": list(worth_dumping(comparison))}
    data_regression.check(results, fullpath=Path(__file__).parent / "divergences.yml")


UPDATED = ("weights", f"{FC1}.weight", RANKS)
# What the recorded run has at its last step beside the values, and what training it again gives; whether it repeats.
REPETITIONS = (
    ({"diverged": (UPDATED,)}, {"diverged": (UPDATED,)}, True),
    ({"diverged": (UPDATED,), "trace": None}, {"diverged": (UPDATED,)}, True),
    ({"gradients": None, "weights": None}, {"diverged": (UPDATED,)}, True),  # nothing was digested, so nothing compared
    ({"trace": None}, {"diverged": (("forward", f"{FC1}/output", RANKS),)}, True),
    ({"diverged": (UPDATED,)}, {}, False),
    ({}, {"diverged": (UPDATED,)}, False),
    ({"diverged": (UPDATED,)}, {"diverged": (("weights", f"{FC1}.weight", ((0,), (1, 2))),)}, False),
    ({"diverged": (UPDATED,)}, {"diverged": (UPDATED, UPDATED)}, False),  # of two parts of one tensor
    ({}, {"diverged": (("forward", f"{FC1}/output", RANKS),)}, False),
    ({"diverged": (UPDATED,)}, {"diverged": (UPDATED,), "loss": "f32:40c80001"}, False),
)


@pytest.mark.parametrize("recorded, repeated, repeats", REPETITIONS)
def test_a_run_repeats_itself_also_where_its_replicas_disagree(recorded, repeated, repeats):
    result = compare(traced_ledger(**recorded), traced_ledger(**repeated), repetition=True)
    assert (result.verdict is Verdict.IDENTICAL) is repeats
    assert (
        compare(traced_ledger(**recorded), traced_ledger(**repeated)).verdict is Verdict.DIFFERENT
    )  # as between two runs


def test_bisect_trains_nothing_for_evaluations(monkeypatch):
    """No trace covers an evaluation."""
    runs = {name: evaluated(name, {2: {"validation/0:8": loss}}) for name, loss in (("a", LOSS), ("b", OTHER_LOSS))}
    monkeypatch.setattr(bisect, "_can_be_trained", lambda ledger: True)
    monkeypatch.setattr(bisect, "read", runs.get)
    assert bisect.new("a", "b", None).recorded.first.phase == "evaluation"


def test_packed_rows_have_no_module_to_find(monkeypatch):
    """No trace covers them, and it is not the user who has asked for one."""
    a, b = (
        Ledger(traced_ledger().header, (record(1, loss=loss),), Path("run") / "ledger.jsonl", torn=False)
        for loss in (LOSS, OTHER_LOSS)
    )
    assert any("tpi bisect" in line for line in remarks(compare(a, b)))
    header = replace(a.header, identity={"dataset.enable_offline_packing": True})
    runs = {"a": replace(a, header=header), "b": replace(b, header=header)}
    assert not any("tpi bisect" in line for line in remarks(compare(*runs.values())))
    monkeypatch.setattr(bisect, "_can_be_trained", lambda ledger: True)
    monkeypatch.setattr(bisect, "read", runs.get)
    with pytest.raises(LedgerError, match="rows of packed sequences have no trace; tpi compare --all a b lists"):
        bisect.new("a", "b", None)


def write_dump(run: Path, last: int, names: tuple[str, str]) -> None:
    """Two tensors of step 2, of which the first ends with other bits in each run."""
    file = dumps.file_of(run, 2, 0)
    file.parent.mkdir(parents=True)
    bits = np.arange(6, dtype=np.uint32).reshape(2, 3)
    other = bits.copy()
    other[1, 2] = last
    parts = {str(n): dumps.DumpedPart(name, "float32", (2, 3), 0, 1, 0).text() for n, name in enumerate(names)}
    save_file({"0": other, "1": bits}, file, metadata={dumps.RANKS: "1", **parts})


@pytest.mark.parametrize("changes, ulp", ((f"gradients/{FC1}.weight", 1), (None, None)))
def test_the_distance_is_of_a_tensor_that_differs_and_of_no_replicas(tmp_path, changes, ulp):
    """Replicas of one run disagree: what the other run dumped of the tensor is not what differs."""
    name = f"gradients/{FC1}.weight"
    b = traced_ledger(changes) if changes else traced_ledger(diverged=(("gradients", f"{FC1}.weight", RANKS),))
    runs = [replace(run, path=tmp_path / side / "ledger.jsonl") for side, run in (("a", traced_ledger()), ("b", b))]
    for side, last in (("a", 5), ("b", 6)):
        write_dump(tmp_path / side, last, (name, "y"))
    result = compare(*runs)
    assert result.first is not None
    assert result.first.name == name
    distance = magnitude(result)
    assert (distance and distance.max_ulp) == ulp


def test_distances_of_all_that_was_written_out(tmp_path):
    runs = []
    for name, last in (("a", 5), ("b", 6)):
        write_dump(tmp_path / name, last, ("x", "y"))
        runs.append(replace(traced_ledger(), path=tmp_path / name / "ledger.jsonl"))
    results = distances(compare(*runs), 2, ["x", "y", "z"])
    assert {name: results[name].get("differing") for name in results} == {"x": 1, "y": 0, "z": None}
    assert (results["x"]["max_ulp"], results["x"]["first"]) == (1, (1, 2))
    assert "has no z" in results["z"]["error"]
    assert set(distances(compare(*runs), 1, ["x"])["x"]) == {"error"}


# Steps after which each of the two runs recorded its weights, the step at which they part, and how far they agree.
KNOWN = (
    ((1, 2, 3, 4), (1, 2, 3, 4), 4, 3), ((1, 2, 3, 4), (2, 4), 4, 2), ((2, 4), (2, 4), 4, 2), ((2, 4), (2, 4), 2, 0),
    ((), (1, 2, 3, 4), 4, 0), ((1, 3), (2, 4), 4, 0),
)  # fmt: skip


@pytest.mark.parametrize("a, b, step, last", KNOWN)
def test_runs_agree_for_certain_where_both_recorded_their_weights(a, b, step, last):
    first = traced_ledger().steps[0]
    runs = [
        replace(
            traced_ledger(),
            steps=tuple(replace(first, step=n, weights=first.weights if n in at else None) for n in range(1, 5)),
        )
        for at in (a, b)
    ]
    assert bisect._last_equal(runs, step) == last


def test_a_run_has_its_own_environment_but_the_machines(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("NCCL_", "CUDA_"))]:
        monkeypatch.delenv(name)
    here = {"NCCL_ALGO": "^NVLS", "NCCL_NTHREADS": "64", "CUDA_VISIBLE_DEVICES": "3", "UNRELATED": "1"}
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with bisect._environment({"NCCL_ALGO": "Ring", "CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}):
        inside = {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "CUDA_", "UNREL"))}
        os.environ["LEFT_BEHIND"] = "1"
    assert inside == {
        "NCCL_ALGO": "Ring", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_VISIBLE_DEVICES": "3", "UNRELATED": "1",
    }  # fmt: skip
    assert dict(os.environ) == before


def test_a_run_that_was_resumed_in_another_way_is_reported():
    resumed = [{"after_step": 2, "changed": {"layout.tp": 2}}]
    run = traced_ledger()
    changed = replace(run, header=replace(run.header, notes={"resumed": resumed}))
    assert bisect._other_layouts([run]) == []
    assert bisect._other_layouts([run, changed]) == [
        "run went on after step 2 with other layout.tp: it is trained again as it was last"
    ]
