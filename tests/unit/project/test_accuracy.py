"""`scripts/accuracy`: a tree is as near to the fp64 reference as stock, and the script would say so if it were not."""

import importlib.util
import sys
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.release

SCRIPT = Path(__file__).parents[3] / "scripts" / "accuracy"


@pytest.fixture(scope="module")
def accuracy():
    loader = SourceFileLoader("accuracy_script", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    sys.modules[loader.name] = module  # where dataclasses look a class's module up
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def accuracy_rows(accuracy):
    return list(accuracy.measure("cpu"))


def test_no_tree_is_worse_than_stock(accuracy, accuracy_rows):
    assert len(accuracy_rows) == 2 * 6 * (3 + 3 + 2 + 3 + 2)
    assert accuracy.worse(accuracy_rows) == []


def test_sums_over_ranks_in_bf16_are_worse_than_a_tree(accuracy_rows):
    results = {
        row.way: row.rms
        for row in accuracy_rows
        if (row.operation, row.result, row.dtype) == ("row-parallel", "y", torch.bfloat16)
    }
    assert results["stock t=4"] > 1.5 * results["tree V=8"]


def test_what_is_worse_is_named(accuracy, accuracy_rows):
    bad = next(n for n, r in enumerate(accuracy_rows) if (r.dtype, r.way) == (torch.bfloat16, "tree V=4"))
    for rms in (2 * accuracy_rows[bad].rms, float("nan")):
        results = accuracy.worse(
            [*accuracy_rows[:bad], replace(accuracy_rows[bad], rms=rms), *accuracy_rows[bad + 1 :]]
        )
        assert len(results) == 4
        assert all(line.startswith("column-parallel y, torch.bfloat16: tree V=4") for line in results)


@pytest.mark.parametrize("rms, degrees", ((2.4e-7, ["8"]), (1.7e-3, ["1", "2", "4", "8"])), ids=("fp32", "rounded"))
def test_sums_in_fp32_are_compared_in_equal_shapes_alone(accuracy, rms, degrees):
    """Of another degree a library's blocks of k may be half as long, as AVX2's are at t=8."""
    row = accuracy.Row("column-parallel", "y", torch.float32, "", rms, 2e-6)
    rows = [replace(row, way=f"stock t={t}") for t in accuracy.DEGREES]
    results = accuracy.worse([*rows, replace(row, way="tree V=8", rms=1.06 * rms)])
    assert [line.partition("stock t=")[2][0] for line in results] == degrees
    assert accuracy.worse([*rows, replace(row, way="tree V=8", rms=1.04 * rms)]) == []


def test_the_script_prints_a_table(accuracy, accuracy_rows, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["accuracy", "cpu"])
    monkeypatch.setattr(accuracy, "measure", {"cpu": accuracy_rows}.__getitem__)  # measured once for all tests here
    assert accuracy.main() == 0
    output = capsys.readouterr().out
    assert "tree V=8" in output
    assert "cross entropy dlogits" in output
