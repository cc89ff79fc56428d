"""Pages out of templates; drawings as SVG for a page, and as one PNG. Equal drawings give equal bytes."""

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.files import write_atomically
from tp_invariant_recipes.ledger.reader import Progress
from tp_invariant_recipes.report.figures import LIGHT, WIDTH, Drawing, label_logarithms, named, settings, style_sheet


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
