"""The tables of docs/arithmetic.md are those of the code."""

from tests.unit.docs.markdown import DOCUMENTS
from tp_invariant_recipes.numerics.products.defined import BACKENDS

(DOCUMENT,) = [document for document in DOCUMENTS if document.name == "docs/arithmetic.md"]


def test_the_ways_to_compute_a_product_are_those_of_the_code():
    (rows,) = [rows for header, rows in DOCUMENT.tables if header[0] == "way"]
    assert rows == [[way.name, way.device, way.operands, way.used, way.evidence] for way in BACKENDS]
