"""Colours of figures and page. Colour-blind readers can distinguish them, also in a grey print.

The figures on the page use names of colours; the page gives each name a light and a dark value.
"""

import re

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
