"""One audit of a campaign."""

import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from tp_invariant_recipes.errors import ConfigError, Interrupted, TpiError
from tp_invariant_recipes.features.audit import workflow
from tp_invariant_recipes.launch.local import Watch
from tp_invariant_recipes.reading import Listed, Record
from tp_invariant_recipes.runs.audit_dir import AuditedRun

FAILED = "failed"
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)|(?<=rank )[0-9]+")  # of a layer or an expert, or of a rank that failed


@dataclass(frozen=True)
class Trial(Record):
    """An audit of a cell.

    settings: in the order of the command. verdict: one of the audit's, or FAILED.
    first:    "KIND MODULE" of the first tensor beyond rounding; None: there is none.
    """

    settings: Listed[str]
    verdict: str
    text: str
    first: str | None
    seconds: float
    known: str | None = None
    size: float | None = None
    reference: float | None = None
    ranks: str | None = None

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return self.verdict == workflow.WITHIN

    @property
    def covers(self) -> bool:
        """Whether its cell need not be tried again: nothing is known to be wrong."""
        return self.verdict in (workflow.WITHIN, workflow.NOT_DECIDED)

    def same_fault(self, other: "Trial") -> bool:
        """Whether both have one fault: the same tensor of any layer or expert, and the same known fault or none."""
        names = [_NUMBER.sub("*", trial.first or trial.text.partition("\n")[0]) for trial in (self, other)]
        return (self.verdict, self.known, names[0]) == (other.verdict, other.known, names[1])


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
        verdict, text = result["verdict"], result["text"].partition(": ")[2]
        facts["known"] = result["known"]
        if first := result["first"]:
            facts |= {
                "first": f"{first['kind']} {first['module']}",
                "size": first["size"],
                "reference": first["rms"],
                "ranks": f"{', '.join(map(str, first['ranks']))} of {first['of']}",
            }
    except (Interrupted, workflow.StoppedAudit):
        raise Interrupted from None
    except TpiError as error:
        verdict, text = FAILED, str(error).replace("so that nothing can be compared\n", "")
    shutil.rmtree(where / workflow.AUDITED, ignore_errors=True)
    seconds = round(time.monotonic() - begun, 1)
    return Trial(settings, verdict, text, seconds=seconds, **facts), trained
