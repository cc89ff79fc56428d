"""One audit of a campaign."""

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from tp_invariant_recipes.errors import ConfigError, Interrupted, TpiError
from tp_invariant_recipes.features.audit import workflow
from tp_invariant_recipes.features.audit.result import FAILED, Trial
from tp_invariant_recipes.launch.local import Watch
from tp_invariant_recipes.runs.matrix_dir import AuditedRun

# What an audit's process returns: None if no run may have the settings; and the reference that it trained, by its key.
Answer = tuple[Trial | None, dict[str, AuditedRun]]


@contextmanager
def quiet(name: str, planned: workflow.Plan) -> Iterator[Any]:
    """Show nothing, as a `Watch`: a line a cell is enough."""
    yield lambda: None


def audited(
    model: str,
    words: Sequence[str],
    settings: tuple[str, ...],
    where: Path,
    references: Mapping[str, AuditedRun],
    watch: Watch = quiet,
) -> Answer:
    """Audit the overrides `words`, whose cell has `settings`. Interrupted: a signal ended it.

    references: trained by earlier audits; an equal one is taken again.
    """
    begun = time.monotonic()
    trained: dict[str, AuditedRun] = {}
    facts = dict[str, Any](first=None)
    try:
        with redirect_stdout(StringIO()):
            planned = workflow.new(model, words, directory=where)
            workflow.check(planned)
    except ConfigError:
        return None, trained
    try:
        every = {**references}
        result = workflow.execute(planned, watch, keep=True, page=False, references=every)
        trained = {key: run for key, run in every.items() if key not in references}
        verdict, text = result.verdict, result.words.partition(": ")[2]
        facts["known"] = result.known
        if first := result.first:
            facts |= {
                "first": f"{first.kind} {first.module}",
                "size": first.size,
                "reference": first.rms,
                "ranks": f"{', '.join(map(str, first.ranks))} of {first.all_ranks}",
            }
    except (Interrupted, workflow.StoppedAudit):
        raise Interrupted from None
    except TpiError as error:
        verdict, text = FAILED, str(error).replace("so that nothing can be compared\n", "")
    shutil.rmtree(where / workflow.AUDITED, ignore_errors=True)
    seconds = round(time.monotonic() - begun, 1)
    return Trial(settings, verdict, text, seconds=seconds, **facts), trained
