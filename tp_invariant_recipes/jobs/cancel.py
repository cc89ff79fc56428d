"""Cancels jobs."""

from collections.abc import Sequence

from tp_invariant_recipes.jobs import slurm_client, states, status_query
from tp_invariant_recipes.jobs.registry import JUDGE, Submission
from tp_invariant_recipes.jobs.states import JobState


def cancel(submissions: Sequence[Submission]) -> list[list[JobState]]:
    """Cancel all running and waiting jobs of these; returns their previous states. Raises RunError without SLURM."""
    status = status_query.query([part for one in submissions for part in one.parts])
    found = [states.states(one, status) for one in submissions]
    alive = [(one, state.part) for one, of in zip(submissions, found, strict=True) for state in of if state.alive]
    # Cancel the judge first: it waits for the end of the others, and would start. A whole array is cancelled by its
    # own id.
    alive.sort(key=lambda pair: pair[1].role != JUDGE)
    slurm_client.cancel(dict.fromkeys(part.job if one.judge else part.id for one, part in alive))
    return found
