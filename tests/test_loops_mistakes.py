"""Mistakes of people's own loops: a sentence with the way out, that names the lines of the ranks that part ways."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from meshloom.cli.main import main

LOOP = """
import torch
import meshloom as ml

model = ml.parallel(torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(ml.share(torch.randn(4, 3))).sum()
    if step == 3 and not ml.main:
        {mistake}
    loss.backward()
    optimizer.step()
{end}
"""
ENDED = "rank 1 (dp=1), after train.py:8: loss = model(ml.share(torch.randn(4, 3))).sum(), has come to its end while this rank waits for it"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("mistake", "end", "told"),
    [
        ("break", "", (ENDED, "\n  train.py:11: loss.backward()")),
        ("break", "ml.save(model.state_dict(), 'model.pt')", (
            "Rank 0 (dp=0) waits at train.py:11: loss.backward()\n"
            "Rank 1 (dp=1) waits at train.py:13: ml.save(model.state_dict(), 'model.pt')\nAll ranks have waited for one another for 5 s",
        )),
    ],
)  # fmt: skip
def test_a_rank_that_leaves_its_loop_is_named_with_its_line_and_where_the_other_waits(
    mistake: str, end: str, told: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):  # fmt: skip
    (tmp_path / "train.py").write_text(textwrap.dedent(LOOP.format(mistake=mistake, end=end)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])})
    assert main(["run", "train.py", "--plan", "dp=2", "--devices", "cpu"]) == 1
    err = capfd.readouterr().err
    for each in told:
        assert each in err, err
    assert "most recent call" not in err
