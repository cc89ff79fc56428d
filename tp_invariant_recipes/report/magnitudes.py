"""Distances between the tensors that both runs dumped."""

from dataclasses import dataclass

from tp_invariant_recipes.compare.compare import Comparison
from tp_invariant_recipes.ledger import dumps
from tp_invariant_recipes.ledger.dumps import Distance


@dataclass(frozen=True)
class Measured:
    """A tensor of both runs' dumps. name: such as "gradients/decoder.layers.3.mlp.linear_fc1.weight"."""

    step: int
    name: str
    distance: Distance


def measure(comparison: Comparison) -> tuple[Measured, ...]:
    """All tensors that both runs dumped at a compared step, by step and name.

    LedgerError: dumps are damaged, or their shapes differ.
    """
    folders = [ledger.run_directory for ledger in (comparison.a, comparison.b)]
    left, right = (set(dumps.steps(folder)) if folder else set[int]() for folder in folders)
    found = []
    for step in sorted(left & right):
        if step > comparison.steps_compared:
            break
        a, b = (dumps.read_step(folder, step) for folder in folders if folder)
        found += [Measured(step, n, dumps.distance(a.read(n), b.read(n))) for n in a.names if n in b.parts]
    return tuple(found)


def largest(measured: tuple[Measured, ...], kind: str) -> dict[tuple[int, str], int]:
    """(step, parameter) -> largest distance in ULP, of the tensors of `kind` that differ."""
    own = ((one.step, one.name.partition("/"), one.distance.max_ulp) for one in measured)
    return {(step, name): ulp for step, (of, _, name), ulp in own if of == kind and ulp is not None}
