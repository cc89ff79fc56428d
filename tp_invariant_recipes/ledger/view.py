# SPDX-License-Identifier: Apache-2.0
"""A ledger as a program reads it: its steps in order, each with exact numbers and digests."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tp_invariant_recipes.errors import TpiError
from tp_invariant_recipes.ledger import reader
from tp_invariant_recipes.ledger.bits import bits_float
from tp_invariant_recipes.ledger.open import streamed
from tp_invariant_recipes.ledger.schema import StepRecord

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Number:
    """A float of a ledger. Two of them are equal if and only if their bits are: 0.0 is not -0.0.

    Attributes:
        bits: The width and the IEEE 754 pattern in hexadecimal, such as "f32:40c7b717".
    """

    bits: str

    @property
    def value(self) -> float:
        """The number itself."""
        return bits_float(self.bits)


@dataclass(frozen=True)
class Step:
    """One step of a training.

    Attributes:
        step: Its number, from 1 on.
        samples: The sequences since the start of training, with this step's.
        tokens: The tokens of this step.
        skipped: Whether the optimizer skipped the step.
        loss: The mean loss; None if the step was skipped.
        grad_norm: The norm of all gradients before clipping; None if the step was skipped.
        learning_rate: The learning rate of this step.
        gradients: Parameter to digest, of the reduced gradients before clipping. This mapping and those below are
            empty at a step that did not record them.
        masters: Parameter to digest, of the fp32 master weights after the step.
        weights: Parameter to digest, of the weights that are not their master weights rounded.
        moments: "exp_avg/PARAMETER" to digest, of the optimizer's moments after the step.
        evaluations: Losses of validations after the step, such as "validation/8:16" of the sequences 8 to 15.
    """

    step: int
    samples: int
    tokens: int
    skipped: bool
    loss: Number | None
    grad_norm: Number | None
    learning_rate: Number
    gradients: Mapping[str, str]
    masters: Mapping[str, str]
    weights: Mapping[str, str]
    moments: Mapping[str, str]
    evaluations: Mapping[str, Number]

    @classmethod
    def _of(cls, record: StepRecord) -> "Step":
        def number(bits: str | None) -> Number | None:
            return None if bits is None else Number(bits)

        return cls(
            record.step, record.samples, record.tokens, record.skipped,
            number(record.loss), number(record.grad_norm), Number(record.learning_rate),
            record.gradients or {}, record.masters or {}, record.weights or {}, record.moments or {},
            {name: Number(bits) for name, bits in record.evaluations.items()},
        )  # fmt: skip


class Ledger:
    """The steps of a ledger, in their order: `ledger[0]` is step 1. `Ledger.open` reads one.

    Attributes:
        path: The ledger's file, or the certificate that holds it.
        identity: What makes runs comparable: model, data, optimizer and seed, by dotted keys.
        layout: The degrees of parallelism by their short keys, such as {"tp": 2, …}.
        numerics: The settings of the arithmetic, such as {"mode": "tree", …}.
    """

    def __init__(self, ledger: reader.Ledger) -> None:
        self._steps = ledger.steps
        self.path: Path = ledger.path
        self.identity: Mapping[str, Any] = ledger.header.identity
        self.layout: Mapping[str, Any] = ledger.header.layout
        self.numerics: Mapping[str, Any] = ledger.header.numerics

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Ledger":
        """Open a ledger. Its steps stay in the file until they are read.

        Args:
            path: A run or its directory, a ledger file, or a certificate.

        Returns:
            The ledger.

        Raises:
            TpiError: The file is missing, unreadable or no ledger. A damaged step raises it when it is read.
        """
        return cls(streamed(path))

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int) -> Step:
        return Step._of(self._steps[index])

    def __iter__(self) -> Iterator[Step]:
        return map(Step._of, self._steps)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return the numbers of all steps as a table.

        Returns:
            A pandas.DataFrame with a row for each step: `samples`, `tokens`, `skipped`, and of `loss`, `grad_norm` and
            `learning_rate` the value, and the bits under `loss_bits`, `grad_norm_bits` and `learning_rate_bits`.

        Raises:
            TpiError: The package pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise TpiError("to_pandas() needs the package pandas: pip install pandas") from error
        rows = []
        for step in self:
            numbers = {"loss": step.loss, "grad_norm": step.grad_norm, "learning_rate": step.learning_rate}
            row: dict[str, Any] = {name: getattr(step, name) for name in ("step", "samples", "tokens", "skipped")}
            row |= {name: number and number.value for name, number in numbers.items()}
            rows.append(row | {f"{name}_bits": number and number.bits for name, number in numbers.items()})
        return pandas.DataFrame(rows).set_index("step") if rows else pandas.DataFrame()
