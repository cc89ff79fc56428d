"""Trainings whose ledgers are compared: the same run in several layouts."""

from collections.abc import Callable, Iterable, Sequence

from tests.forks import Tpi


def train(tpi: Tpi, words: Iterable[str], run: str, before: Callable[[], None] | None = None) -> list:
    """The steps of a new run. words: the model and overrides, several in a text or one."""
    done = tpi("train", *" ".join(words).split(), f"run.dir={run}", before=before)
    assert done.status == 0, done.stderr
    return tpi.ledger(run)


def agree(tpi: Tpi, words: Iterable[str], layouts: Sequence[str]) -> None:
    """Train in each layout: all ledgers have the same bits, with digests of gradients and master weights."""
    first, *others = [train(tpi, (*words, layout), f"run-{n}") for n, layout in enumerate(layouts)]
    for layout, other in zip(layouts[1:], others, strict=True):
        assert other == first, layout
    assert all(step.gradients for step in first)
    if "precision=fp32" not in " ".join((*words, *layouts)):  # where weights have no masters
        assert all(step.masters for step in first)
    compared = tpi("compare", "run-0", "run-1")
    assert compared.status == 0, compared.stdout
