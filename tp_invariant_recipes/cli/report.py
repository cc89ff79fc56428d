"""`tpi report`: runs on one page."""

from pathlib import Path
from typing import Annotated

import typer

from tp_invariant_recipes.cli.arguments import argument, flag, option
from tp_invariant_recipes.foreign_text import single_line, visible
from tp_invariant_recipes.machine import progress, terminal


def report(
    runs: Annotated[list[Path], argument("RUN", "Run directories, ledger files or certificates.")],
    out: Annotated[Path, option("FILE.html", "Name of the page.")] = Path("report.html"),
    png: Annotated[Path | None, option("FILE.png", "Name of the image; default: beside the page.")] = None,
    no_png: Annotated[bool, flag("Write no image.", "--no-png")] = False,
    force: Annotated[bool, flag("Overwrite existing files.", "--force")] = False,
    open_: Annotated[bool, flag("Show the page in a browser afterwards.", "--open")] = False,
) -> None:
    """Write a page and an image that compare runs with the first.

    The HTML page is one file that loads nothing else. It shows verdicts, headers side by side, curves, distances in
    ULP, the parameters that differ, times and memory. The PNG holds its figures. Runs may be
    unfinished. Exit status: 0 written, whatever the verdict; 2 a run cannot be read or a file not be written.

    \b
    tpi report RUN
    tpi report RUN_A RUN_B --out differences.html
    """
    from tp_invariant_recipes.report import page, render
    from tp_invariant_recipes.report.runs import gather

    image = None if no_png else png or out.with_suffix(".png")
    render.check({"--out": out, "--png": image}, force)
    with progress.Counter(terminal.console(stderr=True)) as slow:
        gathered = gather(runs, reading=slow.reading, comparing=slow.counting("comparing: step"))
        parts = page.sections(gathered)
        drawn = slow.counting("drawing: figure")
        render.write(out, visible(page.page(gathered, parts, drawn)).encode())
        if image:
            drawings = [drawing for part in parts for drawing in part.drawings]
            title = "\n".join(map(single_line, page.verdicts(gathered)))
            render.write(image, render.png(drawings, title, slow.counting("drawing the image: figure")))
    for line in page.verdicts(gathered):
        terminal.print_text(single_line(line))
    for file in filter(None, (out, image)):
        terminal.print_text(f"wrote {file}")
    if open_:
        typer.launch(str(out.resolve()))
