"""The figures of the documentation are what docs/figures/draw.py draws, and each has its place in a
document."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.documents import blocks_of

FIGURES = Path(__file__).parents[1] / "docs/figures"
MOST_BYTES = 120_000


def test_every_figure_is_shown_and_small():
    shown = {
        image
        for block in blocks_of((FIGURES.parent / "how_it_works.md").read_text())
        for image in block.images
    }
    assert shown == {f"figures/{path.name}" for path in FIGURES.glob("*.png")}
    assert max(path.stat().st_size for path in FIGURES.glob("*.png")) < MOST_BYTES


@pytest.mark.slow
@pytest.mark.processes
def test_drawing_them_again_gives_the_same_pictures(tmp_path: Path):
    """Fonts are rendered a little differently by other versions of matplotlib: a hundredth of the brightness,
    on average."""
    done = subprocess.run(
        [sys.executable, str(FIGURES / "draw.py"), str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    import matplotlib.image

    drawn = {path.name: matplotlib.image.imread(path) for path in tmp_path.glob("*.png")}
    assert drawn.keys() == {path.name for path in FIGURES.glob("*.png")}
    for name, picture in drawn.items():
        kept = matplotlib.image.imread(FIGURES / name)
        assert picture.shape == kept.shape and np.abs(picture - kept).mean() < 0.01, (
            f"{name} is not what draw.py draws: python docs/figures/draw.py"
        )
