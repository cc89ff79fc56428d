"""`tpi doctor`."""

import typer
from rich.padding import Padding
from rich.table import Table

from tp_invariant_recipes.cli.arguments import Json
from tp_invariant_recipes.machine import terminal

MARKS = {
    "ok": "[green]ok[/]",
    "missing": "[red]missing[/]",
    "other": "[yellow]untested[/]",
    "optional": "[dim]–[/]",
    "refused": "[yellow]refused[/]",
}


def doctor(as_json: Json = False) -> None:
    """List this machine's software, GPUs, patches and missing parts.

    The first table says how to get each missing part. The list below it says which patches apply here
    (docs/patches.md). Exit status: 2 if a part is missing that training here needs. A refused patch does not count,
    because it stops only the runs that reach its code.
    """
    from tp_invariant_recipes.features import doctor

    findings = doctor.examine()
    if as_json:
        terminal.print_json([finding.as_json() for finding in findings], indent=2)
    else:
        console = terminal.console()
        patches = [finding for finding in findings if isinstance(finding, doctor.PatchFinding)]
        table = Table("what", "found", "", "its purpose, and how to get it")
        for finding in findings:
            if finding not in patches:
                table.add_row(finding.what, finding.present or "", MARKS[finding.state], finding.advice)
        console.print(table)
        # A table of these columns would break names and links in a terminal of 80.
        for patch in patches:
            state = MARKS["refused"] if patch.state == "refused" else patch.present
            console.print(f"[bold]{patch.what}[/]: {state} ({patch.reason})")
            lines = (f"needed by {patch.versions}", f"without it: {patch.advice}", patch.upstream)
            console.print(Padding("\n".join(line for line in lines if line), (0, 0, 0, 2)))
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(2)
