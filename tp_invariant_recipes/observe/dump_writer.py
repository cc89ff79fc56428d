# SPDX-License-Identifier: Apache-2.0
"""Writes dumps: one file a rank and step, which ledger/dumps.py reads."""

from pathlib import Path

import numpy as np
import torch

from tp_invariant_recipes.files import write_atomically
from tp_invariant_recipes.kernels.launch import TensorPart
from tp_invariant_recipes.ledger.dumps import RANKS, DumpedPart, file_of
from tp_invariant_recipes.runs.run_dir import writing

_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DumpWriter:
    """Collects this rank's pieces of a step, then writes them.

    run:   the run directory.
    ranks: how many ranks write, each a file, even one of nothing: so that a missing file is seen.
    """

    def __init__(self, run: Path, rank: int, ranks: int) -> None:
        self.run, self.rank, self.ranks = run, rank, ranks
        self._bits: dict[str, np.ndarray] = {}
        self._parts: dict[str, str] = {RANKS: str(ranks)}

    def add(self, name: str, dtype: str, shape: tuple[int, ...], piece: TensorPart) -> None:
        """Copy a piece of the step's tensor `name`, such as "weights/output_layer.weight", of whole shape `shape`."""
        key = str(len(self._bits))
        values = piece.values.detach()
        bits = values.contiguous().view(_SIGNED[values.element_size()]).cpu().numpy().copy()
        self._bits[key] = bits.view(f"u{bits.itemsize}")
        self._parts[key] = DumpedPart(name, dtype, shape, piece.row, piece.step, piece.column).text()

    def close_step(self, step: int) -> None:
        """Write the file, whole or not at all, over an earlier attempt's. RunError: it cannot be written."""
        from safetensors.numpy import save

        file = file_of(self.run, step, self.rank)
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, save(self._bits, metadata=self._parts))
        self._bits, self._parts = {}, {RANKS: str(self.ranks)}
