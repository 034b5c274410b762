"""The style of all figures: a palette that colour-blind readers can tell apart, line styles, and SVG for a page.

matplotlib draws with the colours of a light page; in the SVG they become CSS variables, so that one figure serves light
and dark pages. Text remains text, in the page's font.
"""

import io
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure

INK, GRID = "#1d2430", "#d5dae2"
# In this order also distinguishable with protanopia, deuteranopia and tritanopia (tests/unit/test_figures.py).
PALETTE = ("#0b6bcb", "#b04700", "#269779", "#711c88", "#ca8207", "#2e1023", "#8791a3")
_DARK_PALETTE = ("#4d9bf0", "#f37b3f", "#32c38b", "#cf7ac1", "#f5c277", "#fbf3e4", "#7d8797")
# Dashes and gaps in multiples of the line width; () is a solid line. There are as many as colours.
_DASHES: tuple[tuple[float, ...], ...] = (
    (),
    (5, 1.6),
    (1.2, 1.4),
    (5, 1.4, 1.2, 1.4),
    (9, 2),
    (2.5, 1.5),
    (5, 1.4, 1.2, 1.4, 1.2, 1.4),
)
LINE_WIDTH = 1.6
RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": LINE_WIDTH,
    "lines.markersize": 3.5,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
}
"""matplotlib's settings for these figures, for `matplotlib.rc_context`."""


class Look(NamedTuple):
    """The style of the i-th line of every figure."""

    colour: str
    dashes: tuple[float, ...]

    @property
    def line_style(self) -> Any:
        """Dashes in matplotlib's form."""
        return (0, self.dashes) if self.dashes else "-"

    @property
    def variable(self) -> str:
        """The page's CSS variable of the colour."""
        return _variable(self.colour)

    @property
    def dash_array(self) -> str:
        """Dashes as an attribute of an SVG line, for a legend."""
        return " ".join(f"{LINE_WIDTH * dash:g}" for dash in self.dashes)


REFERENCE = Look(INK, (3.0, 2.0))
"""The style of a level to compare with."""


def look(index: int) -> Look:
    """Return colour and dashes of line `index`, counted from 0. The first 49 differ, and neighbours differ in both."""
    turn, place = divmod(index, len(PALETTE))
    return Look(PALETTE[place], _DASHES[(place + turn) % len(_DASHES)])


def css_variables(*, dark: bool) -> Mapping[str, str]:
    """Return the palette as CSS variables of the page."""
    return {f"--series-{i}": colour for i, colour in enumerate(_DARK_PALETTE if dark else PALETTE, start=1)}


def to_svg(figure: Figure, name: str) -> str:
    """Convert a figure to scalable SVG for a page; `name` makes its ids unique on the page."""
    buffer = io.StringIO()
    with rc_context(RC):
        figure.savefig(buffer, format="svg", transparent=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for bulk in (r'(?<=<g) id="[^"]*"', r" font-family: [^;]*;", r' transform="rotate\(-0 [^"]*"'):
        svg = re.sub(bulk, "", svg)
    svg = re.sub(r'"[^"<>]*"', lambda quoted: re.sub(r"(?<=\.\d)\d+", "", quoted.group()), svg)  # tenths of a pixel
    svg = re.sub(r"\s+", " ", svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    for colour in (INK, GRID, *PALETTE):
        svg = svg.replace(colour, f"var({_variable(colour)})")
    return re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1, flags=re.DOTALL
    )


def _variable(colour: str) -> str:
    return {INK: "--ink", GRID: "--grid"}.get(colour) or f"--series-{PALETTE.index(colour) + 1}"
