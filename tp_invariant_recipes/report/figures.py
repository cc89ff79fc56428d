# SPDX-License-Identifier: Apache-2.0
"""The figures of a report. They use matplotlib's objects without pyplot and leave its settings unchanged."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.gridspec import GridSpec
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from tp_invariant_recipes.ledger.bits import bits_float, ulp_distance
from tp_invariant_recipes.ledger.reader import Ledger
from tp_invariant_recipes.report.runs import Report, Run
from tp_invariant_recipes.text import plural

# name -> (value on a light screen, value on a dark screen). The lines' colours follow Okabe and Ito.
COLOURS = {
    "ink": ("#1b2330", "#e6e9ee"),
    "faint": ("#5b6675", "#a3adba"),
    "rule": ("#d3d9e1", "#39424f"),
    "paper": ("#fefefd", "#14181f"),
    "line-0": ("#0072b2", "#56b4e9"),
    "line-1": ("#d55e00", "#f28e3c"),
    "line-2": ("#009e73", "#2fc79b"),
    "line-3": ("#aa3377", "#e58abf"),
    "line-4": ("#56b4e8", "#9cd3f2"),
    "line-5": ("#b8860b", "#e8c547"),
}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
LINES = tuple(LIGHT[name] for name in COLOURS if name.startswith("line-"))
STYLES = ("-", "--", "-.", ":")  # lines of identical runs cover each other, so each has its own style too

_NAMES = {light: name for name, light in LIGHT.items()}


def named(svg: str) -> str:
    """Replace colours by their names: `fill: #1b2330` becomes `fill: var(--ink)`."""
    return re.sub(
        r"#[0-9a-f]{6}\b", lambda match: f"var(--{_NAMES[match[0]]})" if match[0] in _NAMES else match[0], svg
    )


def style_sheet(column: int) -> str:
    """CSS declarations of the names. column: 0 for a light screen, 1 for a dark one."""
    return "".join(f"--{name}:{values[column]};" for name, values in COLOURS.items())


def curve(points: Iterable[tuple[int, float | None]]) -> np.ndarray:
    """Make float64 [2, steps] of (step, value). NaN: no finite value, which leaves a gap."""
    pairs = [(step, np.nan if value is None else value) for step, value in points]
    steps, values = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    return np.stack([steps, np.where(np.isfinite(values), values, np.nan)])


def recorded(ledger: Ledger, field: str) -> list[tuple[int, float | None]]:
    """(step, value) of one of the floats that the ledger records as exact bits."""
    texts = ((step.step, getattr(step, field)) for step in ledger.steps)
    return [(step, None if text is None else bits_float(text)) for step, text in texts]


def distances(a: Ledger, b: Ledger, field: str) -> list[tuple[int, float | None]]:
    """(step, ULP) of every common step. None: the bits differ, and one value is a NaN or missing."""
    pairs = (
        (record.step, getattr(record, field), getattr(other, field))
        for record, other in zip(a.steps, b.steps, strict=False)
    )
    return [
        (step, 0 if in_a == in_b else None if in_a is None or in_b is None else ulp_distance(in_a, in_b))
        for step, in_a, in_b in pairs
    ]


WIDTH = 10.8  # inches, of every figure
_CURVES, _DISTANCES, _COSTS = 5.6, 3.4, 3.2  # inches of height
_IN_AXES = 6  # at most so many runs have their legend among the curves
_LABEL = 44  # characters of a legend
_FEW = 60  # at most so many points get marks
_GIB = 2**30

_SETTINGS: Any = {
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), LIGHT["faint"]),
    **dict.fromkeys(("axes.labelcolor", "text.color", "xtick.labelcolor", "ytick.labelcolor"), LIGHT["ink"]),
    **dict.fromkeys(("axes.spines.right", "axes.spines.top"), False),
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.color": LIGHT["rule"],
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "path.simplify_threshold": 1.0,  # points: a figure of many steps stays small, and keeps its extremes
    "svg.fonttype": "none",  # text stays text, for search and screen readers
    "text.parse_math": False,  # a "$" in a name is a "$"
}


@dataclass(frozen=True)
class Drawing:
    """A figure before it is drawn.

    name:   for links. alt: description for screen readers. note: explanation of the axes and colours.
    height: inches.
    draw:   draws on a figure or on part of one.
    """

    name: str
    title: str
    alt: str
    note: str
    height: float
    draw: Callable[[FigureBase], None]


@contextmanager
def settings(**more: Any) -> Iterator[None]:
    """Set matplotlib's parameters for a block that draws and writes figures, and restore them afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # the user's matplotlibrc does not change the figures
        matplotlib.rcParams.update(_SETTINGS | more)
        yield


# --- curves -------------------------------------------------------------------------------------------------


def training(report: Report) -> Drawing:
    """Loss and gradient norm, with a small learning-rate curve below them."""
    shown = {
        field: [curve(recorded(run.ledger, field)) for run in report.runs]
        for field in ("loss", "grad_norm", "learning_rate")
    }

    def draw(figure: FigureBase) -> None:
        grid = axes_grid(figure, _CURVES, 2, 2, height_ratios=(3, 1), hspace=0.42, wspace=0.16)
        few = len(report.runs) <= _IN_AXES  # a legend of its own would leave a gap
        places = {"loss": grid[0, 0], "grad_norm": grid[:, 1] if few else grid[0, 1], "learning_rate": grid[1, 0]}
        axes = {name: figure.add_subplot(place) for name, place in places.items()}
        _lines(axes["loss"], "Loss", "lm loss", shown["loss"])
        _lines(axes["grad_norm"], "Gradient norm", "norm, before clipping", shown["grad_norm"])
        _lines(axes["learning_rate"], "Learning rate", "rate", shown["learning_rate"])
        axes["learning_rate"].yaxis.set_major_locator(MaxNLocator(3))
        axes["learning_rate"].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        handles = [_handle(n, run) for n, run in enumerate(report.runs)]
        if few:
            axes["loss"].legend(handles=handles, loc="best")
        else:
            beside = figure.add_subplot(grid[1, 1])
            beside.axis("off")
            beside.legend(handles=handles, loc="center left", ncols=1 + len(handles) // 6)

    return Drawing(
        "training",
        "Loss, gradient norm and learning rate",
        " ".join(_loss_in_words(run) for run in report.runs),
        _gaps(line for lines in shown.values() for line in lines),
        _CURVES,
        draw,
    )


def distance(report: Report) -> Drawing | None:
    """Return the distances between losses and between gradient norms. None: all are 0, or no step was compared."""
    pairs = [(n, run) for n, (run, comparison) in enumerate(report.pairs, 1) if comparison.tally.compared]
    fields = ("loss", "grad_norm")
    ulps = {field: [distances(report.runs[0].ledger, run.ledger, field) for _, run in pairs] for field in fields}
    if not any(ulp != 0 for runs in ulps.values() for _, ulp in itertools.chain(*runs)):
        return None
    shown = {field: [curve(points) for points in runs] for field, runs in ulps.items()}
    numbers = [n for n, _ in pairs]

    def draw(figure: FigureBase) -> None:
        grid = axes_grid(figure, _DISTANCES, 1, 2, wspace=0.16)
        for column, (field, title) in enumerate(zip(fields, ("Loss", "Gradient norm"), strict=True)):
            axes = figure.add_subplot(grid[0, column])
            name = f"{title}: distance from {report.runs[0].letter}"
            _lines(axes, name, "ULP, 0: equal bits", shown[field], numbers)
            axes.set_yscale("symlog", linthresh=1, linscale=0.4)
            top = max([2.0, *(float(np.nanmax(ulp)) for _, ulp in shown[field] if not np.isnan(ulp).all())])
            axes.set_ylim(-0.15, top * 3)
            axes.yaxis.set_major_formatter(FuncFormatter(_power))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.legend(handles=[_handle(n, report.runs[n]) for n in numbers], loc="best")

    return Drawing(
        "apart",
        "Distance between losses and between gradient norms",
        " ".join(_distance_in_words(run, points) for (_, run), points in zip(pairs, ulps["loss"], strict=True)),
        "One ULP is the step from a floating-point number to the next. The scale is logarithmic above 1; "
        "0 means equal bits. " + _gaps(line for lines in shown.values() for line in lines),
        _DISTANCES,
        draw,
    )


def _distance_in_words(run: Run, points: Sequence[tuple[int, float | None]]) -> str:
    differing, most = sum(ulp != 0 for _, ulp in points), max((ulp for _, ulp in points if ulp is not None), default=0)
    return f"{run.label}: the loss differs at {differing} of {plural(len(points), 'step')}, by at most {most:,} ULP."


def cost(report: Report) -> Drawing | None:
    """Step times, and peak memory if a run recorded it. None: no run recorded step times."""
    timed = [(n, run) for n, run in enumerate(report.runs) if run.timings]
    if not timed:
        return None
    numbers = [n for n, _ in timed]
    runs = [run.timings for _, run in timed]
    times = [curve((t.step, t.seconds) for t in timings) for timings in runs]
    if any(t.peak_memory for timings in runs for t in timings):
        title, unit = "Peak memory, last rank", "GiB"
        beside = [curve((t.step, t.peak_memory / _GIB) for t in timings) for timings in runs]
    else:
        title, unit = "Tokens per second", "tokens/s"
        beside = [curve((t.step, t.tokens / t.seconds if t.seconds else None) for t in timings) for timings in runs]

    def draw(figure: FigureBase) -> None:
        grid = axes_grid(figure, _COSTS, 1, 2, wspace=0.16)
        first, second = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
        _lines(first, "Step time", "seconds", times, numbers)
        first.set_yscale("log")
        first.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        first.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        first.yaxis.set_minor_locator(NullLocator())
        _lines(second, title, unit, beside, numbers)
        second.set_ylim(bottom=0)
        first.legend(handles=[_handle(n, report.runs[n]) for n in numbers], loc="best")

    medians = {run.label: np.median([timing.seconds for timing in run.timings]) for _, run in timed}
    return Drawing(
        "cost",
        "Step time and memory",
        " ".join(f"{label}: the median step took {seconds:.3g} s." for label, seconds in medians.items()),
        ("" if unit == "GiB" else "Runs on a CPU record no memory. ") + _gaps([*times, *beside]),
        _COSTS,
        draw,
    )


def axes_grid(figure: FigureBase, height: float, rows: int = 1, columns: int = 1, **more: Any) -> GridSpec:
    """Return a grid of axes with margins in inches: matplotlib's constrained layout rounds irreproducibly."""
    place = {"left": 0.85 / WIDTH, "right": 1 - 0.15 / WIDTH, "top": 1 - 0.32 / height, "bottom": 0.55 / height}
    return figure.add_gridspec(rows, columns, **place, **more)


def _lines(
    axes: Axes, title: str, unit: str, curves: Sequence[np.ndarray], numbers: Sequence[int] | None = None
) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    for n, (steps, values) in zip(numbers or range(len(curves)), curves, strict=True):
        mark: dict[str, Any] = {"marker": "o", "markersize": 3} if len(steps) <= _FEW else {}
        axes.plot(steps, values, **_look(n), **mark)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _look(n: int) -> dict[str, Any]:
    # The first line is broad, so that it stays visible under an identical second line.
    return {
        "color": LINES[n % len(LINES)],
        "linestyle": STYLES[n % len(STYLES)],
        "linewidth": 3.2 if n == 0 else 1.4,
        "alpha": 0.55 if n == 0 else 1.0,
    }


def _handle(n: int, run: Run) -> Line2D:
    label = run.label if len(run.label) <= _LABEL else f"{run.label[: _LABEL // 2]}…{run.label[-_LABEL // 2 :]}"
    return Line2D([], [], label=label, **_look(n))


def _power(value: float, _: int) -> str:
    if value < 1e4:
        return f"{value:,.0f}"
    return f"10{str(round(np.log10(value))).translate(str.maketrans('0123456789', '⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def _loss_in_words(run: Run) -> str:
    points = [(step, value) for step, value in recorded(run.ledger, "loss") if value is not None]
    if not points:
        return f"{run.label}: no step has a loss."
    (first, start), (last, end) = points[0], points[-1]
    return f"{run.label}: loss {start:.4g} at step {first}, {end:.4g} at step {last}."


def _gaps(curves: Iterable[np.ndarray]) -> str:
    missing = sum(int(np.isnan(values).sum()) for _, values in curves)
    return f"Gaps are values that are not finite numbers: {missing}." if missing else ""
