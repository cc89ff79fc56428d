"""SLURM's status of the parts of submissions: its rows, and the row of each part."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.jobs import slurm_client
from tp_invariant_recipes.jobs.registry import JobPart
from tp_invariant_recipes.jobs.slurm_client import Accounted, Queued


@dataclass(frozen=True)
class SlurmStatus:
    """Rows of the controller and of the accounts. unavailable: why the query failed; None: it succeeded."""

    queued: tuple[Queued, ...] = ()
    accounted: Mapping[str, Accounted] = field(default_factory=dict)
    unavailable: str | None = None

    def queued_row(self, part: JobPart) -> Queued | None:
        """The controller's row for a part; None: the controller does not know it, or no longer knows it."""
        rows = self._by_job.get(part.job, ()) if part.ours else ()
        if part.task is None:
            return rows[0] if rows else None
        own = next((row for row in rows if row.task == part.task), None)
        return own or next((row for row in rows if row.task and _holds(row.task, int(part.task))), None)

    @cached_property
    def _by_job(self) -> Mapping[str, Sequence[Queued]]:
        found: dict[str, list[Queued]] = {}
        for row in self.queued:
            found.setdefault(row.job, []).append(row)
        return found

    def account(self, part: JobPart) -> Accounted | None:
        """The account of a part. Tasks that were cancelled while they waited share one: "12_[0-4]"."""
        if not part.ours or part.task is None or part.id in self.accounted:
            return self.accounted.get(part.id) if part.ours else None
        several = [id for id in self.accounted if id.startswith(f"{part.job}_[")]
        found = (id for id in several if _holds(id.partition("_")[2], int(part.task)))
        return next((self.accounted[id] for id in found), None)


def query(parts: Sequence[JobPart], queued: Iterable[Queued] | None = None) -> SlurmStatus:
    """The status of these parts. Raises RunError when SLURM is not installed or does not answer.

    queued: the controller's rows; None: query it.
    """
    if queued is None:
        queued = slurm_client.queue(dict.fromkeys(part.job for part in parts if part.ours))
    known = SlurmStatus(tuple(queued))
    gone = [part.id for part in parts if part.ours and known.queued_row(part) is None]
    return SlurmStatus(known.queued, slurm_client.accounting(gone))


def query_all() -> SlurmStatus:
    """All jobs of this user that the controller knows; no accounts."""
    try:
        return SlurmStatus(tuple(slurm_client.queue()))
    except RunError as error:
        return SlurmStatus(unavailable=str(error))


def _holds(listed: str, task: int) -> bool:
    """Whether SLURM's list of tasks contains this one: "0-4", "[0,2-4%2]" or, truncated, "0,2,..."."""
    spans = [span.split("-") for span in re.sub(r"[\[\]]|%.*|\.\.\.", "", listed).split(",") if span]
    return "..." in listed or any(int(span[0]) <= task <= int(span[-1]) for span in spans)
