"""The style of all figures: line styles, and a palette that colour-blind readers can tell apart.

A look names the colour of a light page; the page has it as a CSS variable, which dark pages set otherwise.
"""

from collections.abc import Mapping
from typing import NamedTuple

INK = "#1d2430"
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


class Look(NamedTuple):
    """The style of the i-th line of every figure."""

    colour: str
    dashes: tuple[float, ...]

    @property
    def variable(self) -> str:
        """The page's CSS variable of the colour."""
        return "--ink" if self.colour == INK else f"--series-{PALETTE.index(self.colour) + 1}"

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
