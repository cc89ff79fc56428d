"""No folder is a drawer, and a unit test stands in the folder of its room."""

from collections import Counter

from tests.source_trees import PACKAGE, PROJECT, other_trees, trees

FILES = 20  # of Python
OF_THE_PROJECT = {"docs", "project"}  # tests of pages, and of the sources as a whole


def test_a_folder_has_few_files():
    counts = Counter(file.parent for file in [*trees(), *other_trees()])
    assert {str(folder): count for folder, count in counts.items() if count > FILES} == {}


def test_unit_tests_mirror_the_product():
    folders = {
        file.relative_to(PROJECT / "tests" / "unit").parent for file in (PROJECT / "tests" / "unit").rglob("test_*.py")
    }
    assert {str(folder) for folder in folders if not (PACKAGE / folder).is_dir()} == OF_THE_PROJECT
