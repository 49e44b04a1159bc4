"""Boxes, arrows and words on a page measured in inches, so that what fits into a box on one figure fits on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

# Okabe and Ito's colours, which can be told apart by people who are colour-blind, made lighter so that black words can be read.
RANKS = ("#8fc7ea", "#f2b766", "#7fcbb0", "#d9a5c3")
EVERYBODY, NOTHING, LINE, QUIET = "#f5e27a", "#f4f4f4", "#333333", "#666666"
DOTS_PER_INCH = 100


class Page:
    """One figure: x from the left, y from the bottom, in inches."""

    def __init__(self, width: float, height: float) -> None:
        self.figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH)
        self.axes: Any = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_xlim(0, width)
        self.axes.set_ylim(0, height)
        self.axes.axis("off")

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        words: str = "",
        *,
        colour: str = NOTHING,
        size: float = 11,
        bold: bool = False,
    ) -> None:
        """Words in the middle of a box whose lower left corner is at (x, y)."""
        self.axes.add_patch(
            Rectangle((x, y), width, height, facecolor=colour, edgecolor=LINE, linewidth=1.8 if bold else 0.8)
        )
        self.words(x + width / 2, y + height / 2, words, size=size)

    def shade(self, x: float, y: float, width: float, height: float) -> None:
        """A box without border, for what lies behind others."""
        self.axes.add_patch(Rectangle((x, y), width, height, facecolor=NOTHING, linewidth=0))

    def words(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 11,
        at: str = "center",
        colour: str = "black",
        bold: bool = False,
    ) -> None:
        """at: what of the words is at x: center, left or right."""
        weight = "bold" if bold else "normal"
        self.axes.text(
            x, y, words, fontsize=size, ha=at, va="center", color=colour, fontweight=weight, linespacing=1.35
        )

    def arrow(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        *,
        both: bool = False,
        colour: str = LINE,
        bend: float = 0.0,
    ) -> None:
        """From one point to another. bend: how far the middle leaves the straight line, as a share of its length."""
        style = {
            "arrowstyle": "<|-|>" if both else "-|>",
            "color": colour,
            "linewidth": 1.4,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        self.axes.annotate("", end, start, arrowprops={**style, "connectionstyle": f"arc3,rad={bend}"})

    def save(self, path: Path) -> None:
        """Write it as a PNG."""
        self.figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None})
