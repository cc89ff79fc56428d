# SPDX-License-Identifier: Apache-2.0
"""`tpi compare` of ledgers with digests: its lines, its JSON, and dumps beside it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.unit.comparison.ledgers import (
    FC1,
    FC2,
    HEADER,
    NAMES,
    NO_STATE,
    PARAMETERS,
    A,
    grown,
    ledger,
    record,
    tpi_compare,
    value,
    with_other,
    with_trace,
)
from tp_invariant_recipes.ledger import dumps
from tp_invariant_recipes.ledger.digests import in_order
from tp_invariant_recipes.ledger.reader import Ledger
from tp_invariant_recipes.ledger.record import LedgerWriter


def write_ledger_of(ledger: Ledger) -> None:
    """Into the directory that its path names."""
    ledger.path.parent.mkdir(exist_ok=True)
    with LedgerWriter(ledger.path).create(ledger.header) as writer:
        for step in ledger.steps:
            writer.append(step)


@pytest.fixture
def ledger_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_ledger_of(A)
    return tmp_path


def test_a_table_shows_the_first_parameters_and_all_on_request(ledger_folder):
    order = in_order(NAMES)
    write_ledger_of(grown(*(("weights", name, 2 + n % 2) for n, name in enumerate(order[:-1]))))
    result = tpi_compare("a", "b")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"different at step 2: weight of {order[0]} differs after the step, its gradient and")
    assert lines[0].endswith("; 4 of 5 steps differ")
    assert lines[1] == "13 of 14 parameters differ, the first at step 2"
    assert "and 1 more (--all)" in lines
    names = [line.split()[0] for line in lines if line.split() and line.split()[0] in NAMES]
    assert names == [*order[:-1:2], *order[1:-1:2]][:12]
    everything = tpi_compare("a", "b", "--all").stdout
    assert all(name in everything for name in order[:-1])
    assert "--all" not in everything


def test_a_table_that_would_repeat_one_line_is_omitted(ledger_folder):
    write_ledger_of(grown(*(("weights", name, 2) for name in NAMES)))
    result = tpi_compare("a", "b").stdout
    assert "all 14 parameters differ: weights from step 2\n" in result
    assert result.count(NAMES[3]) == 0
    assert tpi_compare("a", "b", "--all").stdout.count(NAMES[3]) == 1


def test_json_has_everything(ledger_folder):
    write_ledger_of(ledger("b", traced=(3,), **with_other(3, gradients=NAMES[1], weights=NAMES[2])))
    parameters = (replace(PARAMETERS[0], shape=(1, 128)), *PARAMETERS[1:])
    write_ledger_of(ledger("c", header=replace(HEADER, parameters=parameters)))
    different, model = json.loads(tpi_compare("--json", "a", "b", "c").stdout)["comparisons"]
    first, coverage = different["first_difference"], different["coverage"]
    assert (first["a"], first["b"]) == (record(3).gradients[NAMES[1]], value("other", NAMES[1]))
    assert first["explanation"] == f"gradient of {NAMES[1]} differs, loss matched"
    assert different["parameters"] == [
        {"name": NAMES[1], "kind": "gradients", "steps": [3]},
        {"name": NAMES[2], "kind": "weights", "steps": [3]},
    ]
    both = {name for name, count in coverage.items() if count == {"both": 5, "only_a": 0, "only_b": 0}}
    assert both == {"loss", "grad_norm", "learning_rate", "gradients", "weights"}
    assert coverage["trace"] == {"both": 0, "only_a": 0, "only_b": 1}
    assert model["model"] == [{"parameter": NAMES[0], "a": "shape [8, 16]", "b": "shape [1, 128]"}]


def dump(run: str, *values: float, shape: tuple[int, ...] = (2, 2), name: str = f"forward/{FC2}/output") -> Path:
    file = dumps.file_of(Path(run), 3, 0)
    file.parent.mkdir(parents=True, exist_ok=True)
    bits = np.array(values, dtype=np.float32).view(np.uint32).reshape(shape)
    part = dumps.DumpedPart(name, "float32", shape, row=0, step=1, column=0)
    save_file({"0": bits}, file, {dumps.RANKS: "1", "0": part.text()})
    return file


@pytest.fixture
def traced_runs(ledger_folder):
    """Runs a and b, traced at step 3, where an output differs."""
    Path("a/ledger.jsonl").unlink()
    write_ledger_of(ledger("a", traced=(2, 3)))
    write_ledger_of(ledger("b", traced=(2, 3), **with_trace(3, f"forward/{FC2}/output")))


def lines_below(*arguments: str) -> list[str]:
    """The lines below the verdict of `tpi compare a b`."""
    return tpi_compare("a", "b", *arguments).stdout.splitlines()[1:]


def test_dumps_show_the_distance_of_values(traced_runs):
    dump("a", 1.0, 2.0, 3.0, 4.0)
    assert lines_below() == [NO_STATE, "To see how far apart the values are: tpi bisect a b"]
    dump("b", 1.0, 2.0, float(np.nextafter(np.float32(3.0), np.float32(4.0))), float("nan"))
    assert lines_below() == [
        f"forward/{FC2}/output: 2 of 4 elements differ, by at most 1 ULP and 2.38e-07, 1 of them with a NaN, the first "
        "at [1, 0].",
        NO_STATE,
    ]
    [comparison] = json.loads(tpi_compare("a", "b", "--json").stdout)["comparisons"]
    distance = comparison["first_difference"]["distance"]
    assert (distance["total"], distance["differing"], distance["max_ulp"], distance["first"]) == (4, 2, 1, [1, 0])


def test_dumps_of_another_tensor_do_not_count(traced_runs):
    for run in ("a", "b"):
        dump(run, 1.0, 2.0, 3.0, 4.0, name=f"forward/{FC1}/output")
    assert lines_below() == [NO_STATE, "To see how far apart the values are: tpi bisect a b"]


def test_damaged_dumps_hide_no_difference(traced_runs):
    dump("a", 1.0, 2.0, 3.0, 4.0)
    file = dump("b", 1.0, 2.0, 3.0, 4.5)
    file.write_bytes(file.read_bytes()[:-3])
    result = tpi_compare("a", "b")
    assert result.exit_code == 1
    assert f"the dumps do not show how far apart: {file} is not a whole dump" in result.stdout
    [comparison] = json.loads(tpi_compare("a", "b", "--json").stdout)["comparisons"]
    assert str(file) in comparison["first_difference"]["distance"]["error"]


def test_dumps_of_other_shapes_are_reported(traced_runs):
    dump("a", 1.0, 2.0, 3.0, 4.0)
    dump("b", 1.0, 2.0, 3.0, 4.0, shape=(4, 1))
    assert "no distance between float32 [2, 2] and float32 [4, 1]" in lines_below()[0]


def test_a_ledger_on_its_own_cannot_be_bisected(ledger_folder):
    write_ledger_of(replace(ledger(**with_other(3, gradients=NAMES[1])), path=Path("b/other.jsonl")))
    assert "bisect" not in tpi_compare("a", "b/other.jsonl").stdout


def test_a_torn_line_hides_no_difference_before_it(ledger_folder):
    write_ledger_of(ledger("b", **with_other(3, weights=NAMES[2])))
    with open("b/ledger.jsonl", "rb+") as stream:
        stream.truncate(stream.seek(0, 2) - 10)
    result = tpi_compare("a", "b")
    assert result.exit_code == 1
    assert "; 1 of 4 steps differ; b ends at step 4\n" in result.stdout
    assert "b: the last line is torn" in result.stdout
