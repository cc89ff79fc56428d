"""The page of an audit: the verdict, a figure of all tensors in the order of data flow, and a table of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jinja2 import Environment
from markupsafe import Markup
from matplotlib.figure import FigureBase

from tp_invariant_recipes.compare.deviation import KINDS, TensorDeviation
from tp_invariant_recipes.plural import counted
from tp_invariant_recipes.report.figures import Drawing
from tp_invariant_recipes.report.palette import LINES, style_sheet
from tp_invariant_recipes.report.render import svg

_HEIGHT = 3.6  # inches
_LEAST, _MOST = 1e-2, 1e9  # factors beyond these lie on the edge

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { {{ light }} } @media screen and (prefers-color-scheme: dark) { :root { {{ dark }} } }
body { margin: 0 auto; padding: 1.5rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, "DejaVu Sans", sans-serif; }
svg { display: block; width: 100%; height: auto; } table { border-collapse: collapse; font-size: .9rem; }
td, th { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--rule); }
td.number { text-align: right; } .beyond { font-weight: 700; } .note { color: var(--faint); }
</style></head><body>
<h1>{{ title }}</h1>
<p>{{ facts }}</p>
<figure>{{ figure }}<figcaption class="note">{{ note }}</figcaption></figure>
<table><thead><tr><th>step</th><th>tensor</th><th>factor</th><th>ranks</th><th>error</th></tr></thead><tbody>
{% for one in rows %}<tr{% if one.beyond %} class="beyond"{% endif %}><td>{{ one.step }}</td><td>{{ one.name }}</td>
<td class="number">{{ "%.3g"|format(one.factor) }}</td><td>{{ one.ranks|join(", ") }}</td><td>{{ one.shape or "" }}</td>
</tr>{% endfor %}
</tbody></table>
{% if left %}<p class="note">Not compared: {{ left|join(", ") }}.</p>{% endif %}
</body></html>
"""


def page(result: dict[str, Any], found: Sequence[TensorDeviation]) -> str:
    """The HTML. result: the contents of `audit.json`."""
    drawing = factors(found, result["margin"])
    names = ("model", "overrides", "reference", "recorded", "device", "bytes", "seconds")
    facts = "; ".join(f"{name}: {_words(result[name])}" for name in names if result.get(name))
    return (
        Environment(autoescape=True)
        .from_string(_PAGE)
        .render(
            title=result["text"],
            light=style_sheet(0),
            dark=style_sheet(1),
            facts=facts,
            figure=Markup(svg(drawing)),
            note=drawing.note,
            rows=found,
            left=result["not_compared"],
        )
    )


def factors(found: Sequence[TensorDeviation], margin: float) -> Drawing:
    """Every tensor's factor, in the order of data flow."""

    def draw(figure: FigureBase) -> None:
        axes = figure.add_subplot(111)
        for n, kind in enumerate(KINDS):
            at = [place for place, one in enumerate(found) if one.kind == kind]
            heights = np.clip([found[place].factor for place in at], _LEAST, _MOST)
            if at:
                axes.plot(at, heights, linestyle="", marker="o", markersize=3, color=LINES[n % len(LINES)], label=kind)
        axes.axhline(margin, color=LINES[1], linewidth=1, linestyle="--")
        axes.set_yscale("log")
        axes.set_xlabel("tensors in the order of data flow")
        axes.set_ylabel("error / rounding")
        axes.legend(loc="best", ncols=len(KINDS))

    beyond = sum(one.beyond for one in found)
    words = f"{beyond} of {counted(len(found), 'tensor')} are beyond rounding."
    note = f"{words} The line is {margin:g} times what rounding moves; an exact tensor lies at the bottom."
    return Drawing("factors", "Error of every tensor", words, note, _HEIGHT, draw)


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
