"""The page of `tpi score --against`: the verdict, a figure of differences by position, and the worst tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.figure import FigureBase
from matplotlib.ticker import FuncFormatter

from tp_invariant_recipes.foreign_text import single_line
from tp_invariant_recipes.plural import counted
from tp_invariant_recipes.report.figures import Drawing, axes_grid
from tp_invariant_recipes.report.palette import LINES
from tp_invariant_recipes.report.render import html, svg

_HEIGHT = 3.8  # inches
_LEAST = 1e-7  # |d| below it lies at the bottom
_EMPTY = 0.7  # where a bar of no tokens ends


def page(result: dict[str, Any]) -> str:
    """Return the HTML. result: as `features.score.against.judge` returns it."""
    files = [_file(number, report) for number, report in enumerate(result["files"])]
    verdict = "Beyond" if result["exit_status"] else "Within"
    title = f"{verdict} the tolerance of {result['tolerance']:g}"
    return html("score.html.j2", title=title, result=result, files=files)


def _file(number: int, report: dict[str, Any]) -> dict[str, Any]:
    drawing = differences(report, number)
    summary = report["summary"]
    figures = (
        ("tokens", f"{summary['tokens']:,}"),
        ("of scored", f"{report['scored']:,}"),
        ("equal bits", f"{summary['equal']:,}"),
        ("mean KL, k1", f"{summary['k1']:.3g}"),
        ("mean KL, k3", f"{summary['k3']:.3g}"),
        ("mean |d|", f"{summary['mean']:.3g}"),
        ("99.9 % below", f"{summary['p999']:.3g}"),
        ("largest |d|", f"{summary['largest']:.3g}"),
        ("ratio outside [0.8, 1.25]", f"{summary['outside']:,} ({summary['outside_share']:.2%})"),
    )
    texts = {name: [row | {"text": single_line(row["text"])} for row in report[name]] for name in ("worst", "by_token")}
    return report | texts | {"figures": figures, "figure": Markup(svg(drawing)), "note": drawing.note}


def differences(report: dict[str, Any], number: int = 0) -> Drawing:
    """|d| by position: tokens as points, mean and 99th percentile as lines; beside it d, signed, as a histogram."""

    def draw(figure: FigureBase) -> None:
        grid = axes_grid(figure, _HEIGHT, 1, 2, wspace=0.2)
        axes, beside = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
        places, values = zip(*report["points"], strict=True)
        axes.plot(places, [max(abs(v), _LEAST) for v in values], ".", markersize=2, color=LINES[0], alpha=0.4)
        _steps(axes, report["by_position"])
        axes.set_yscale("log")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_title("|d| by position")
        axes.set_xlabel("position of the token")
        axes.set_ylabel("|log p of engine - reference|")
        axes.legend(loc="best")
        counts, edges = np.histogram(values, bins=61)
        beside.stairs(np.maximum(counts, _EMPTY), edges, baseline=_EMPTY, fill=True, color=LINES[0])
        beside.set_yscale("log")
        beside.set_ylim(bottom=_EMPTY)
        beside.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        beside.set_title("d, engine - reference")
        beside.set_xlabel("difference of log-probabilities")
        beside.set_ylabel("tokens")

    summary = report["summary"]
    words = f"{counted(summary['tokens'], 'token', ',')}; the largest difference is {summary['largest']:.3g}."
    note = (
        f"{words} A point is a token; of many, some evenly chosen ones and the largest. Differences below {_LEAST:g}, "
        "also of equal bits, lie at the bottom."
    )
    return Drawing(f"differences-{number}", "Differences of log-probabilities", words, note, _HEIGHT, draw)


def _steps(axes: Any, bins: Sequence[dict[str, Any]]) -> None:
    middles = [(row["from"] * (row["to"] + 1)) ** 0.5 for row in bins]
    for name, word, color in (("mean", "mean", LINES[1]), ("p99", "99 % below", LINES[2])):
        axes.plot(middles, [max(row[name], _LEAST) for row in bins], marker="o", markersize=3, color=color, label=word)
