"""`tpi runs`."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tp_invariant_recipes.cli.arguments import Json, argument, flag
from tp_invariant_recipes.cli.output import lines
from tp_invariant_recipes.cli.output.lines import Line
from tp_invariant_recipes.foreign_text import single_line
from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.plural import counted

if TYPE_CHECKING:
    from tp_invariant_recipes.runs.overview import RunRow

_COLOURS = {"completed": "green", "failed": "red", "damaged": "red", "killed": "yellow", "stopped": "yellow"}
_HEAD = ("run", "state", "step", "loss", "layout", "model", "numerics", "same")


def runs(
    folder: Annotated[Path, argument("FOLDER", "Where to look; default runs.", show_default=True)] = Path("runs"),
    every: Annotated[bool, flag("Also the runs that commands made for themselves.", "--all")] = False,
    as_json: Json = False,
) -> None:
    """List the runs below a folder: state, step, loss, layout.

    The run whose last attempt began latest comes last. Runs with the same letter in the column "same" are comparable:
    they have the same model, data, optimizer and seed. States: running; completed; stopped (Ctrl-C or SIGTERM);
    failed; killed (it recorded no exit status); not started (submitted); damaged, with the reason. Exit status: 0,
    whatever the states; 2 there is no such folder.

    Runs that verify, bench, bisect and audit made for themselves are hidden without --all, unless FOLDER is
    the directory of such a command.

    \b
    tpi runs
    tpi runs --all
    tpi runs /scratch/me --json | jq '.runs[] | select(.state == "failed")'
    tpi train --resume last
    """
    from tp_invariant_recipes.runs import overview

    where = folder.expanduser()
    to_person = terminal.console(stderr=True)
    with to_person.status(f"looking for runs below {where}") if to_person.is_terminal else nullcontext():
        there = overview.rows(where)
    shown = [row for row in there if every or not row.own or where in (row.run, row.run.parent)]
    hidden = len(there) - len(shown)
    names = overview.groups(shown)
    if as_json:
        rows = [row.as_dict() | {"same": names.get(row.identity_hash or "")} for row in shown]
        terminal.print_json({"schema": 1, "runs": rows, "hidden": hidden})
        return
    if shown:
        lines.show(_HEAD, [_line(row, names) for row in shown], numeric=("step", "loss"), coloured="state")
    else:
        terminal.print_text(f"no run below {single_line(str(where))}")
    if hidden:
        to_person.print(f"hidden: {counted(hidden, 'run')} of {', '.join(overview.MAKERS)}; tpi runs --all lists them")


def _line(row: "RunRow", names: dict[str, str]) -> Line:
    from tp_invariant_recipes.ledger.bits import readable

    seen, of = row.as_dict(), "" if row.last.to_step is None else f"/{row.last.to_step}"
    layout = seen["layout"] or {}
    degrees = " ".join(f"{name}={layout[name]}" for name in layout if name == "tp" or layout[name] > 1)
    cells = (
        str(row.run),
        row.state,
        "" if row.step is None or row.record is None else f"{row.step}{of}",
        "" if row.loss is None else str(readable(row.loss)),
        degrees,
        seen["model"] or "",
        seen["numerics"] or "",
        names.get(row.identity_hash or "", ""),
    )
    # The first line of a reason; with the second where the first only introduces it.
    first, *more = list(filter(None, map(str.strip, (row.why or "").splitlines()))) or [""]
    return Line(cells, _COLOURS.get(row.state, ""), f"{first} {more[0]}" if first.endswith(":") and more else first)
