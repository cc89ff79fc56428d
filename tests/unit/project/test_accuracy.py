# SPDX-License-Identifier: Apache-2.0
"""`scripts/accuracy`: a tree is as near to the fp64 reference as stock, and the script would say so if it were not."""

import importlib.util
import sys
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
