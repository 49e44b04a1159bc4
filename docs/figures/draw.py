"""Draws the figures of the documentation from the product's own values: python docs/figures/draw.py [DIRECTORY]"""

from __future__ import annotations

import sys
from pathlib import Path

import data
import model

FIGURES = {
    "batch_split": data.batch_split,
    "ring": data.ring,
    "promise": data.promise,
    "pipeline": model.pipeline,
    "column_and_row": model.column_and_row,
    "grid": model.grid,
    "held": model.held,
}


def main(directory: Path) -> None:
    """A PNG of each."""
    for name, draw in FIGURES.items():
        draw().save(directory / f"{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
