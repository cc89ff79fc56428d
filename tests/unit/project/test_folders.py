# SPDX-License-Identifier: Apache-2.0
"""No folder is a drawer, and a unit test stands in the folder of its room."""

from collections import Counter

from tests.source_trees import PACKAGE, PROJECT, python_files

FILES = 20  # of Python
OF_THE_PROJECT = {"docs", "project"}  # tests of pages, and of the sources as a whole


def test_a_folder_has_few_files():
    counts = Counter(file.parent for file in python_files("tp_invariant_recipes", "tests", "scripts", "examples"))
    assert {str(folder): count for folder, count in counts.items() if count > FILES} == {}


def test_unit_tests_mirror_the_product():
    unit = PROJECT / "tests" / "unit"
    folders = {file.relative_to(unit).parent for file in unit.rglob("test_*.py")}
    assert {str(folder) for folder in folders if not (PACKAGE / folder).is_dir()} == OF_THE_PROJECT
