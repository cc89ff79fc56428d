"""Colours of figures and page: told apart by people who are colour-blind, and in grey on paper.

A figure of the page has no colours of its own but names, which the page gives a light and a dark value.
"""

import re

# name -> value in the light, on a dark screen. Lines after Okabe and Ito.
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
    "identical": ("#a6cee3", "#35627c"),
    "some": ("#cc79a7", "#b0638f"),
    "different": ("#7a1f4b", "#ee8fbd"),
}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
LINES = tuple(LIGHT[name] for name in COLOURS if name.startswith("line-"))
STYLES = ("-", "--", "-.", ":")  # a style each as well, since lines of identical runs lie upon each other

_NAMES = {light: name for name, light in LIGHT.items()}


def named(svg: str) -> str:
    """Put names in the place of colours: `fill: #1b2330` becomes `fill: var(--ink)`."""
    return re.sub(
        r"#[0-9a-f]{6}\b", lambda match: f"var(--{_NAMES[match[0]]})" if match[0] in _NAMES else match[0], svg
    )


def style_sheet(column: int) -> str:
    """Declarations of the names; column: 0 in the light, 1 on a dark screen."""
    return "".join(f"--{name}:{values[column]};" for name, values in COLOURS.items())
