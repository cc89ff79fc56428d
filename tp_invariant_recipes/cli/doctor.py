"""`tpi doctor`."""

import json

import typer
from rich.console import Console
from rich.table import Table

from tp_invariant_recipes.cli.arguments import Json

MARKS = {"ok": "[green]ok[/]", "missing": "[red]missing[/]", "other": "[yellow]untested[/]", "optional": "[dim]–[/]"}


def doctor(as_json: Json = False) -> None:
    """Say what this machine has, what is missing and how to get it.

    Exit status 1 when something is missing that training here needs.
    """
    from tp_invariant_recipes.launch import diagnosis

    findings = diagnosis.examine()
    if as_json:
        print(json.dumps([finding.__dict__ for finding in findings], indent=2))
    else:
        table = Table("what", "found", "", "for what it is and how to get it")
        for finding in findings:
            table.add_row(finding.what, finding.found or "", MARKS[finding.state], finding.advice)
        Console().print(table)
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)
