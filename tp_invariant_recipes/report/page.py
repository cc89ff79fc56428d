# SPDX-License-Identifier: Apache-2.0
"""The page: one HTML file about all runs that loads nothing from the network."""

import io
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from tp_invariant_recipes import __version__
from tp_invariant_recipes.comparison.compare import Comparison
from tp_invariant_recipes.comparison.text import parameter_rows, remarks, verdict_line
from tp_invariant_recipes.files import write_atomically
from tp_invariant_recipes.ledger.schema import IDENTITY, INFORMATIVE, canonical
from tp_invariant_recipes.report import figures
from tp_invariant_recipes.report.figures import WIDTH, Drawing, named, settings, style_sheet
from tp_invariant_recipes.report.runs import Report, Run
from tp_invariant_recipes.runs.run_dir import writing
from tp_invariant_recipes.text import plural


def write(file: Path, data: bytes) -> None:
    """Write a file atomically. RunError: the file cannot be written."""
    with writing(file, "--out FILE on another disk"):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, data)


def svg(drawing: Drawing) -> Markup:
    """Return the drawing as an <svg> element for a page, in the page's colours and font. Its text is escaped."""
    with settings(**{"svg.hashsalt": drawing.name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure = Figure(figsize=(WIDTH, drawing.height), facecolor="none")
        drawing.draw(figure)
        stream = io.StringIO()
        FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None})
    document = stream.getvalue()
    head, body = document[document.index("<svg") :].split(">", 1)
    box = head[head.index("viewBox=") :].split('"')[1]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body).replace("xlink:href", "href")
    body = re.sub(r"\n\s*", "\n", body)
    start = f'<svg viewBox="{box}" role="img" aria-labelledby="{drawing.name}-alt">'
    return Markup(named(f"{start}{body.strip()}"))


_ROWS = 40  # at most, of the table of parameters
_NOT_SET = "not set"


@dataclass(frozen=True)
class PageTable:
    """Rows of text; the first column holds their names."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """A section of the page, listed in its contents."""

    name: str
    title: str
    sentences: tuple[str, ...] = ()
    drawings: tuple[Drawing, ...] = ()
    tables: tuple[PageTable, ...] = ()


def headline(report: Report) -> str:
    """Return the title of the page."""
    if len(report.runs) == 1:
        return f"Run {report.runs[0].name}"
    others = ", ".join(run.name for run in report.runs[1:])
    return f"{report.runs[0].name} compared with {others}"


def verdicts(report: Report) -> list[str]:
    """One line for every run after the first; one for a run alone."""
    if not report.comparisons:
        ledger = report.runs[0].ledger
        return [f"One run of {plural(len(ledger.steps), 'step', ',')}; nothing to compare it with."]
    return [f"{run.label}: {verdict_line(comparison)}" for run, comparison in report.pairs]


def sections(report: Report) -> tuple[Section, ...]:
    """Return the sections after the runs and headers."""
    parts = [Section("training", "Curves", drawings=(figures.training(report),))]
    if (distance := figures.distance(report)) is not None:
        parts.append(Section("apart", "Distance", drawings=(distance,)))
    elif any(comparison.tally.compared for comparison in report.comparisons):
        words = "Losses and gradient norms are equal at all compared steps: distance 0."
        parts.append(Section("apart", "Distance", sentences=(words,)))
    if tables := tuple(_table(run, report.runs[0], found) for run, found in report.pairs if found.tally.parameters):
        parts.append(Section("parameters", "Parameters that differ", tables=tables))
    if (cost := figures.cost(report)) is not None:
        parts.append(Section("cost", "Time and memory", drawings=(cost,)))
    return tuple(parts)


def page(report: Report, parts: tuple[Section, ...]) -> str:
    """Return the HTML. parts: the result of `sections`."""
    each = [run.facts for run in report.runs]
    names = dict.fromkeys(name for facts in each for name in facts)
    environment = Environment(
        loader=PackageLoader(__name__.rpartition(".")[0], "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["svg"] = svg
    return environment.get_template("page.html.j2").render(
        light=style_sheet(0),
        dark=style_sheet(1),
        title=headline(report),
        verdicts=_boxes(report),
        runs=[run.label for run in report.runs],
        facts=[{"field": name, "cells": [facts.get(name, "") for facts in each]} for name in names],
        headers=_headers(report),
        sections=parts,
        version=__version__,
    )


def _boxes(report: Report) -> list[dict[str, Any]]:
    if not report.comparisons:
        return [{"style": "alone", "run": "", "line": verdicts(report)[0], "remarks": ()}]
    return [
        {
            "style": comparison.verdict.value.replace(" ", "-"),
            "run": run.label,
            "line": verdict_line(comparison),
            "remarks": remarks(comparison),
        }
        for run, comparison in report.pairs
    ]


def _headers(report: Report) -> dict[str, list[dict[str, Any]]]:
    """Return the fields of all headers side by side, as text; fields of the identity come first."""
    columns = [_fields(run) for run in report.runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows: dict[str, list[dict[str, Any]]] = {"differing": [], "equal": []}
    for name in names:
        texts = [column.get(name, _NOT_SET) for column in columns]
        cells = [{"text": text, "differs": text != texts[0]} for text in texts]
        rows["differing" if len(set(texts)) > 1 else "equal"].append({"field": name, "cells": cells})
    return rows


def _fields(run: Run) -> dict[str, str]:
    header = run.ledger.header
    fields = {name: canonical(value) for name, value in getattr(header, IDENTITY).items()}
    for part in INFORMATIVE:
        fields |= {f"{part}.{name}": canonical(value) for name, value in getattr(header, part).items()}
    return fields | {"parameters with digests": str(len(header.parameters))}


def _table(run: Run, first: Run, comparison: Comparison) -> PageTable:
    rows = [
        (row.name, *map(_number, (row.gradient, row.moments, row.weight, row.steps)))
        for row in parameter_rows(comparison)
    ]
    columns = "gradient differs from step", "moments differ from step", "weight differs from step", "at steps"
    more = f"; the first {_ROWS} of {len(rows):,}" if len(rows) > _ROWS else ""
    caption = f"{run.label} against {first.label}, in the order of their first difference{more}"
    return PageTable(caption, ("parameter", *columns), tuple(rows[:_ROWS]))


def _number(count: int | None) -> str:
    return "" if count is None else f"{count:,}"
