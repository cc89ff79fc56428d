# SPDX-License-Identifier: Apache-2.0
"""scripts/try-versions refuses what Megatron-Bridge's metadata excludes, and what it checks with is there."""

import importlib.machinery
import importlib.util

import pytest

from tests.unit.docs.markdown import ROOT

LOADER = importlib.machinery.SourceFileLoader("try_versions", str(ROOT / "scripts" / "try-versions"))
PROGRAM = importlib.util.module_from_spec(importlib.util.spec_from_loader("try_versions", LOADER))
LOADER.exec_module(PROGRAM)


@pytest.mark.parametrize(
    "name, version, allowed",
    (("transformers", "5.12.1", True), ("transformers", "5.13.0", False), ("torch", "2.15.0", True)),
)
def test_the_metadata_of_bridge_decides(name, version, allowed):
    assert PROGRAM.allowed(name, version) is allowed


def test_its_tests_are_there():
    assert [file for file in PROGRAM.TESTS if not (ROOT / file).is_file()] == []
