# SPDX-License-Identifier: Apache-2.0
"""The page of an audit: the verdict, a figure of all tensors in the order of data flow, and a table of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.figure import FigureBase

from tp_invariant_recipes.comparison.deviation import KINDS, MARGIN, TensorDeviation
from tp_invariant_recipes.features.audit.result import AuditResult, CampaignResult
from tp_invariant_recipes.report.figures import LINES, Drawing
from tp_invariant_recipes.report.page import html, svg
from tp_invariant_recipes.text import plural

_HEIGHT = 3.6  # inches
_LEAST, _MOST = 1e-2, 1e9  # factors beyond these lie on the edge


def page(result: AuditResult) -> str:
    """Return the HTML of one audit."""
    drawing = factors(result.deviations, MARGIN)
    names = ("model", "overrides", "reference", "recorded", "device", "bytes", "seconds")
    facts = "; ".join(f"{name}: {_words(result.facts[name])}" for name in names if result.facts.get(name))
    return html(
        "audit.html.j2",
        title=result.words,
        facts=facts,
        figure=Markup(svg(drawing)),
        note=drawing.note,
        rows=result.deviations,
        not_compared=result.omitted,
    )


def campaign(result: CampaignResult) -> str:
    """Return the HTML of `tpi audit --all`."""
    shown = ("option", "module", "size", "reference", "ranks")
    findings = [
        finding | {"described": [(name, finding[name]) for name in shown if finding.get(name) is not None]}
        for finding in (fault.as_json() for fault in result.findings)
    ]
    tried = result.pairs - result.pending
    facts = f"{tried} of {plural(result.pairs, 'pair')} of settings, {plural(len(result.trials), 'audit')}"
    return html(
        "audits.html.j2",
        title=f"{result.model}: {plural(len(findings), 'fault')}",
        facts="; ".join((facts, " ".join((*result.overrides, *result.sizes)))),
        findings=findings,
        trials=result.trials,
        refused=result.refused,
    )


def factors(deviations: Sequence[TensorDeviation], margin: float) -> Drawing:
    """Draw every tensor's factor, in the order of data flow."""

    def draw(figure: FigureBase) -> None:
        axes = figure.add_subplot(111)
        for n, kind in enumerate(KINDS):
            at = [place for place, deviation in enumerate(deviations) if deviation.kind == kind]
            heights = np.clip([deviations[place].factor for place in at], _LEAST, _MOST)
            if at:
                axes.plot(at, heights, linestyle="", marker="o", markersize=3, color=LINES[n % len(LINES)], label=kind)
        axes.axhline(margin, color=LINES[1], linewidth=1, linestyle="--")
        axes.set_yscale("log")
        axes.set_xlabel("tensors in the order of data flow")
        axes.set_ylabel("error / rounding")
        axes.legend(loc="best", ncols=len(KINDS))

    beyond = sum(deviation.beyond for deviation in deviations)
    words = f"{beyond} of {plural(len(deviations), 'tensor')} are outside rounding-error tolerance."
    note = f"{words} The line is {margin:g} times a 1-ULP perturbation; an exact tensor lies at the bottom."
    return Drawing("factors", "Error of every tensor", words, note, _HEIGHT, draw)


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
