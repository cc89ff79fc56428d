"""A part of a tensor that a rank holds, as a table of rows and columns."""

from typing import NamedTuple

from torch import Tensor


class TablePlace(NamedTuple):
    """Rows `row`, `row + step`, … (`rows` of them) and columns `column` … `column + columns - 1` of the whole."""

    row: int
    step: int
    rows: int
    column: int
    columns: int


class TensorPart(NamedTuple):
    """A part of a table. Its row i is row `row + i · step` of the whole, its column j is column `column + j`.

    values: [rows, columns], columns adjacent in memory; a view of a weight, a gradient or what the optimizer keeps.
    copy:   the same values rounded, if they are fp32: bf16 [rows, columns], columns adjacent in memory.
    name:   of the tensor in the whole model (ledger/digests.py says which names); "" where one tensor is meant.
    shape:  of the whole tensor.
    """

    values: Tensor
    row: int
    column: int
    step: int = 1
    copy: Tensor | None = None
    name: str = ""
    shape: tuple[int, ...] = ()

    @property
    def place(self) -> TablePlace:
        """Its place in the whole."""
        return TablePlace(self.row, self.step, self.values.shape[0], self.column, self.values.shape[1])
