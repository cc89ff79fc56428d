"""The page of `tpi score --against`: the verdict, a figure of differences by position, and the worst tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jinja2 import Environment
from markupsafe import Markup
from matplotlib.figure import FigureBase
from matplotlib.ticker import FuncFormatter

from tp_invariant_recipes.foreign_text import one_line
from tp_invariant_recipes.plural import counted
from tp_invariant_recipes.report.figures import WIDTH, Drawing
from tp_invariant_recipes.report.palette import LINES, style_sheet
from tp_invariant_recipes.report.render import svg

_HEIGHT = 3.8  # inches
_LEAST = 1e-7  # |d| below it lies at the bottom
_EMPTY = 0.7  # where a bar of no tokens ends

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Scores: {{ title }}</title>
<style>
:root { {{ light }} } @media screen and (prefers-color-scheme: dark) { :root { {{ dark }} } }
body { margin: 0 auto; padding: 1.5rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; overflow-wrap: anywhere; }
figure { margin: 1rem 0; }
svg { display: block; width: 100%; height: auto; } .wide { overflow-x: auto; }
svg.panel { display: none; }
@media (max-width: 40rem) { svg.panel { display: block; margin-top: 1rem; }
  .whole { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); } }
table { border-collapse: collapse; font-size: .9rem; }
td, th { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
td.number, th.number { text-align: right; white-space: nowrap; }
td.text { font-family: monospace; white-space: pre; }
.beyond { font-weight: 700; } .note { color: var(--faint); }
</style></head><body>
<h1>{{ title }}</h1>
<p class="note">Reference: {{ result.scores }}{% if result.nearer is not none %};
{{ result.files[result.nearer].file }} is nearer to it{% endif %}</p>
{% for one in files %}<section><h2>{{ one.file }}</h2>
{% for line in one.suspects %}<p class="beyond">{{ line }}</p>{% endfor %}
<div class="wide"><table><thead><tr>{% for name, _ in one.figures %}
<th class="number">{{ name }}</th>{% endfor %}</tr></thead>
<tbody><tr>{% for _, value in one.figures %}<td class="number">{{ value }}</td>{% endfor %}</tr></tbody></table></div>
<figure>{{ one.figure }}<figcaption class="note">{{ one.note }}</figcaption></figure>
<h3>The tokens that differ most</h3>
<div class="wide"><table><thead><tr><th>sequence</th><th class="number">position</th><th class="number">token</th>
<th class="number">reference</th><th class="number">engine</th><th>text up to the token</th></tr></thead><tbody>
{% for row in one.worst %}<tr><td>{{ row.sequence }}</td><td class="number">{{ row.position }}</td>
<td class="number">{{ row.token }}</td><td class="number">{{ "%.4f"|format(row.reference) }}</td>
<td class="number">{{ "%.4f"|format(row.engine) }}</td><td class="text">{{ row.text }}</td></tr>{% endfor %}
</tbody></table></div>
<h3>The tokens that most of the difference comes from</h3>
<div class="wide"><table><thead><tr><th class="number">token</th><th class="number">how often</th>
<th class="number">mean |d|</th><th>text</th></tr></thead><tbody>
{% for row in one.by_token %}<tr><td class="number">{{ row.token }}</td><td class="number">{{ row.count }}</td>
<td class="number">{{ "%.3g"|format(row.mean) }}</td><td class="text">{{ row.text }}</td></tr>{% endfor %}
</tbody></table></div></section>{% endfor %}
</body></html>
"""


def page(result: dict[str, Any]) -> str:
    """The HTML. result: as `workflows.score_against.judge` returns it."""
    files = [_file(number, one) for number, one in enumerate(result["files"])]
    verdict = "Beyond" if result["exit_status"] else "Within"
    title = f"{verdict} the tolerance of {result['tolerance']:g}"
    return (
        Environment(autoescape=True)
        .from_string(_PAGE)
        .render(title=title, result=result, files=files, light=style_sheet(0), dark=style_sheet(1))
    )


def _file(number: int, one: dict[str, Any]) -> dict[str, Any]:
    drawing = differences(one, number)
    found = one["summary"]
    figures = (
        ("tokens", f"{found['tokens']:,}"),
        ("equal bits", f"{found['equal']:,}"),
        ("mean KL, k1", f"{found['k1']:.3g}"),
        ("mean KL, k3", f"{found['k3']:.3g}"),
        ("mean |d|", f"{found['mean']:.3g}"),
        ("99.9 % below", f"{found['p999']:.3g}"),
        ("largest |d|", f"{found['largest']:.3g}"),
        ("ratio outside [0.8, 1.25]", f"{found['outside']:,} ({found['outside_share']:.2%})"),
    )
    texts = {name: [row | {"text": one_line(row["text"])} for row in one[name]] for name in ("worst", "by_token")}
    return one | texts | {"figures": figures, "figure": Markup(svg(drawing)), "note": drawing.note}


def differences(one: dict[str, Any], number: int = 0) -> Drawing:
    """|d| by position: tokens as points, mean and 99th percentile as lines; beside it d, signed, as a histogram."""

    def draw(figure: FigureBase) -> None:
        inches = {"left": 0.85, "right": WIDTH - 0.15}
        grid = figure.add_gridspec(
            1, 2, left=inches["left"] / WIDTH, right=inches["right"] / WIDTH, top=1 - 0.32 / _HEIGHT,
            bottom=0.55 / _HEIGHT, wspace=0.2,
        )  # fmt: skip
        axes, beside = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
        places, values = zip(*one["points"], strict=True)
        axes.plot(places, [max(abs(v), _LEAST) for v in values], ".", markersize=2, color=LINES[0], alpha=0.4)
        _steps(axes, one["by_position"])
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

    words = (
        f"{counted(one['summary']['tokens'], 'token', ',')}; the largest difference is {one['summary']['largest']:.3g}."
    )
    note = (
        f"{words} A point is a token; of many, some evenly chosen ones and the largest. Differences below {_LEAST:g}, "
        "also of equal bits, lie at the bottom."
    )
    return Drawing(f"differences-{number}", "Differences of log-probabilities", words, note, _HEIGHT, draw, panels=2)


def _steps(axes: Any, bins: Sequence[dict[str, Any]]) -> None:
    middles = [(row["from"] * (row["to"] + 1)) ** 0.5 for row in bins]
    for name, word, color in (("mean", "mean", LINES[1]), ("p99", "99 % below", LINES[2])):
        axes.plot(middles, [max(row[name], _LEAST) for row in bins], marker="o", markersize=3, color=color, label=word)
