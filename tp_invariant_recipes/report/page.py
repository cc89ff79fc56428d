"""The page: one HTML file about all runs that loads nothing from the network."""

import io
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from tp_invariant_recipes import __version__
from tp_invariant_recipes.compare.compare import Comparison
from tp_invariant_recipes.compare.text import parameter_rows, remarks, verdict_line
from tp_invariant_recipes.errors import LedgerError, RunError
from tp_invariant_recipes.files import write_atomically
from tp_invariant_recipes.ledger import dumps
from tp_invariant_recipes.ledger.dumps import Distance
from tp_invariant_recipes.ledger.reader import Progress
from tp_invariant_recipes.ledger.schema import IDENTITY, INFORMATIVE, canonical
from tp_invariant_recipes.report import figures
from tp_invariant_recipes.report.figures import LIGHT, WIDTH, Drawing, label_logarithms, named, settings, style_sheet
from tp_invariant_recipes.report.runs import Report, Run, bisected
from tp_invariant_recipes.text import counted


def check(files: Mapping[str, Path | None], force: bool = False) -> None:
    """RunError: lists every file that exists, without `force`, or has two options. files: option -> its file."""
    wanted = [(option, file) for option, file in files.items() if file]
    problems = [
        f"{file} exists already: give another file by {option}, or overwrite it by --force"
        for option, file in wanted
        if file.exists() and not force
    ]
    names: dict[Path, str] = {}
    for option, file in wanted:
        earlier = names.setdefault(file.resolve(), option)
        if earlier != option:
            problems.append(f"{earlier} and {option} name the same file, {file}: give each its own")
    if problems:
        raise RunError("\n".join(problems))


def write(file: Path, data: bytes) -> None:
    """Write a file atomically. RunError: the file cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, data)
    except OSError as error:
        raise RunError(f"cannot write {file}: {error.strerror or error}") from error


_DPI = 110


def html(template: str, **values: Any) -> str:
    """Return a page of a template beside this module, in colours for light and dark screens."""
    environment = Environment(
        loader=PackageLoader(__name__.rpartition(".")[0], "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(light=style_sheet(0), dark=style_sheet(1), **values)


def svg(drawing: Drawing) -> str:
    """Return the drawing as an <svg> element for a page, in the page's colours and font."""
    with settings(**{"svg.hashsalt": drawing.name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure = Figure(figsize=(WIDTH, drawing.height), facecolor="none")
        drawing.draw(figure)
        label_logarithms(figure)
        stream = io.StringIO()
        FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None})
    return named(_element(stream.getvalue(), drawing))


def png(drawings: Sequence[Drawing], title: str = "", progress: Progress | None = None) -> bytes:
    """All drawings, one below the other. title: lines above them. progress: told (figures drawn, figures in all)."""
    with settings(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        heights = [0.25 + 0.16 * len(title.splitlines()), *(drawing.height for drawing in drawings)]
        figure = Figure(figsize=(WIDTH, sum(heights)), dpi=_DPI, facecolor=LIGHT["paper"])
        heading, *parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        heading.text(0.01, 0.5, title, va="center", fontweight="bold")
        for done, (part, drawing) in enumerate(zip(parts, drawings, strict=True), start=1):
            part.set_facecolor("none")
            drawing.draw(part)
            label_logarithms(part)
            if progress:
                progress(done, len(drawings))
        stream = io.BytesIO()
        FigureCanvasAgg(figure).print_png(stream, metadata={"Software": None})
    return stream.getvalue()


def _element(document: str, drawing: Drawing) -> str:
    """Turn matplotlib's document into an element of a page, without preamble, addresses and duplicate ids."""
    head, body = document[document.index("<svg") :].split(">", 1)
    box = head[head.index("viewBox=") :].split('"')[1]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body).replace("xlink:href", "href")
    body = re.sub(r"\n\s*", "\n", body)
    start = f'<svg viewBox="{box}" role="img" aria-labelledby="{drawing.name}-alt">'
    return f"{start}{body.strip()}"


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
        return [f"One run of {counted(len(ledger.steps), 'step', ',')}; nothing to compare it with."]
    return [f"{run.label}: {verdict_line(comparison)}" for run, comparison in report.pairs]


def sections(report: Report) -> tuple[Section, ...]:
    """Return the sections after the runs and headers."""
    measured = [_measured(comparison) for comparison in report.comparisons]
    parts = [Section("training", "Curves", drawings=(figures.training(report),)), *_distance(report)]
    parts += [*_parameters(report), *_dumps(report, measured)]
    if (cost := figures.cost(report)) is not None:
        parts.append(Section("cost", "Time and memory", drawings=(cost,)))
    return tuple(parts)


def page(report: Report, parts: tuple[Section, ...], progress: Progress | None = None) -> str:
    """Return the HTML. parts: the result of `sections`. progress: told (figures drawn, figures in all)."""
    each = [run.facts for run in report.runs]
    names = dict.fromkeys(name for facts in each for name in facts)
    return html(
        "page.html.j2",
        title=headline(report),
        verdicts=_boxes(report),
        runs=[run.label for run in report.runs],
        facts=[{"field": name, "cells": [facts.get(name, "") for facts in each]} for name in names],
        headers=_headers(report),
        sections=list(_rendered(parts, progress)),
        version=__version__,
    )


def _rendered(parts: Sequence[Section], progress: Progress | None) -> Iterator[dict[str, Any]]:
    """Yield the sections as the template takes them. Drawing a figure escapes the figure's text."""
    total, done = sum(len(part.drawings) for part in parts), 0
    for part in parts:
        drawings = []
        for drawing in part.drawings:
            drawn = Markup(svg(drawing))
            texts = {name: getattr(drawing, name) for name in ("name", "title", "alt", "note")}
            drawings.append(texts | {"svg": drawn})
            done += 1
            if progress:
                progress(done, total)
        yield vars(part) | {"drawings": drawings}


def _boxes(report: Report) -> list[dict[str, Any]]:
    if not report.comparisons:
        return [{"style": "alone", "run": "", "line": verdicts(report)[0], "remarks": ()}]
    answers, verdicts_ = [], []
    for run, comparison in report.pairs:
        sentences, answer = remarks(comparison), bisected(report.runs[0], run)
        if answer is not None:
            style = "different" if answer.text.startswith("different") else "not-comparable"
            box = {"style": style, "run": f"tpi bisect of {report.runs[0].label} and {run.label}", "line": answer.text}
            answers.append(box | {"remarks": answer.sentences})
            sentences = tuple(sentence for sentence in sentences if "tpi bisect" not in sentence)
        style = comparison.verdict.value.replace(" ", "-")
        verdicts_.append({"style": style, "run": run.label, "line": verdict_line(comparison), "remarks": sentences})
    return [*answers, *verdicts_]


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


def _distance(report: Report) -> Iterable[Section]:
    drawing = figures.distance(report)
    if drawing is not None:
        yield Section("apart", "Distance", drawings=(drawing,))
    elif any(comparison.steps_compared for comparison in report.comparisons):
        words = "Losses and gradient norms are equal at all compared steps: distance 0."
        yield Section("apart", "Distance", sentences=(words,))


@dataclass(frozen=True)
class Measured:
    """A tensor of both runs' dumps. name: such as "gradients/decoder.layers.3.mlp.linear_fc1.weight"."""

    step: int
    name: str
    distance: Distance


def _measured(comparison: Comparison) -> tuple[Measured, ...] | str:
    """Measure the tensors that both runs dumped at a compared step, or say why the dumps cannot be compared."""
    folders = [ledger.run_directory for ledger in (comparison.a, comparison.b)]
    in_a, in_b = (set(dumps.steps(folder)) if folder else set[int]() for folder in folders)
    tensors = []
    try:
        for step in sorted(step for step in in_a & in_b if step <= comparison.steps_compared):
            a, b = (dumps.read_step(folder, step) for folder in folders if folder)
            tensors += [Measured(step, n, dumps.distance(a.read(n), b.read(n))) for n in a.names if n in b.parts]
    except LedgerError as error:
        return f"The dumps cannot be compared: {error}"
    return tuple(tensors)


def _parameters(report: Report) -> Iterable[Section]:
    tables = tuple(_table(run, report.runs[0], comparison) for run, comparison in report.pairs if comparison.parameters)
    if tables:
        yield Section("parameters", "Parameters that differ", tables=tables)


def _table(run: Run, first: Run, comparison: Comparison) -> PageTable:
    rows = [
        (row.name, *map(_number, (row.gradient, row.moments, row.weight, row.steps)))
        for row in parameter_rows(comparison)
    ]
    columns = "gradient differs from step", "moments differ from step", "weight differs from step", "at steps"
    caption = f"{run.label} against {first.label}, in the order of their first difference"
    return _shortened(caption, ("parameter", *columns), rows)


def _shortened(caption: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> PageTable:
    more = f"; the first {_ROWS} of {len(rows):,}" if len(rows) > _ROWS else ""
    return PageTable(f"{caption}{more}", columns, tuple(rows[:_ROWS]))


def _number(count: int | None) -> str:
    return "" if count is None else f"{count:,}"


def _dumps(report: Report, measured: list[tuple[Measured, ...] | str]) -> Iterable[Section]:
    sentences, tables = [], []
    for (run, _), tensors in zip(report.pairs, measured, strict=True):
        if isinstance(tensors, str):
            sentences.append(f"{run.label}: {tensors}")
        elif tensors:
            tables.append(_distances(run, report.runs[0], tensors))
    if sentences or tables:
        yield Section("dumps", "Dumped tensors", tuple(sentences), tables=tuple(tables))


def _distances(run: Run, first: Run, measured: tuple[Measured, ...]) -> PageTable:
    rows = [
        (
            tensor.name,
            _number(tensor.step),
            f"{tensor.distance.differing:,} of {tensor.distance.total:,}",
            _number(tensor.distance.max_ulp),
            "" if tensor.distance.max_difference is None else f"{tensor.distance.max_difference:.3g}",
            _number(tensor.distance.nans or None),
        )
        for tensor in measured
    ]
    columns = "tensor", "step", "elements that differ", "largest distance, ULP", "largest difference", "with a NaN"
    return _shortened(f"{run.label} against {first.label}, tensors that both dumped", columns, rows)
