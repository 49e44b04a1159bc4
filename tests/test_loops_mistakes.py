"""Mistakes of people's own loops: a sentence with the way out, that names the lines of the ranks that part ways."""

from __future__ import annotations

import copy
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import meshloom as ml
from meshloom.cli.main import main
from meshloom.core.errors import CollectiveError, TrainingError
from meshloom.loops import error_notes
from meshloom.loops.error_notes import note_of
from meshloom.loops.ranks import leave_ranks, ranks
from meshloom.loops.taken_shares import TakenShare
from tests.loop_cases import Net, made
from tests.processes import on_ranks

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


def _of_torch(what: str) -> Exception:
    try:
        exec(what, {"torch": torch, "F": torch.nn.functional})  # noqa: S102
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("torch.ones(4, 2) + torch.ones(8, 2)", "has 4 of the batch's 8 samples: ml.share(x)"),
        ("F.cross_entropy(torch.ones(8, 2), torch.zeros(4).long())", "ml.gather(x) has the rows of all"),
        ("torch.ones(4, 2) + torch.ones(4, 8)", None),
        ("torch.load('/nowhere')", "`with ml.main_first():`"),
        ("import io; torch.load(io.BytesIO(b'half'))", "ml.save(...), in place of torch.save"),
        ("open('/nowhere')", "goes around what makes or removes files"),
        ("raise ValueError('trying to initialize the default process group twice!')", "leave init_process_group out"),
    ],
)  # fmt: skip
def test_errors_of_others_that_ranks_bring_about_have_the_way_out(
    what: str, said: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(error_notes, "bound", lambda: TakenShare((4, 4), 0))
    monkeypatch.setattr(error_notes, "newest", lambda: TakenShare((4, 4), 0))
    note = note_of(_of_torch(what))
    assert note == said or (said and note and said in note)


def test_calls_that_differ_have_the_way_out():
    assert "what decides (if, break, except)" in (note_of(CollectiveError("rank 0 called this")) or "")
    assert note_of(TrainingError("8 and 4 are told")) is None


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from torch.from_numpy(numpy.random.default_rng().normal(size=(24, 6)))


def _batches_of_its_own(of: str) -> str:
    order = numpy.random.default_rng()
    data = TensorDataset(torch.randn(24, 6, dtype=torch.float64))
    try:
        model = ml.parallel(made())
        if of == "ml.share":
            batches: Any = (ml.share(torch.from_numpy(order.normal(size=(8, 6)))) for _ in range(3))
        elif of == "a stream":
            batches = ml.loader(DataLoader(_Stream(), 8))
        else:
            batches = (x for (x,) in ml.loader(DataLoader(data, 8, sampler=order.permutation(24).tolist())))
        for x in batches:
            model(x).sum().backward()
        return ""
    except TrainingError as error:
        return str(error)
    finally:
        leave_ranks(well=False)


@pytest.mark.processes
@pytest.mark.parametrize("of", ["ml.share", "a stream", "a sampler"])
def test_shares_of_unlike_batches_are_named(of: str):
    for told in on_ranks(_batches_of_its_own, 2, of):
        assert told.startswith("Rank 1 takes its share of another batch than rank 0."), told


def _on_one_rank_alone() -> dict[str, str]:
    """What each mistake is answered with, under tp, where there are no whole parameters to compare."""
    model, found = ml.parallel(made(), "tp=2"), dict[str, str]()
    first = ranks().own.rank == 0
    optimizer = torch.optim.Adam(model.parameters())

    def loads_another_file() -> None:
        model.load_state_dict({name: each + first for name, each in model.state_dict().items()})

    def resumes_its_optimizer() -> None:
        if first:
            optimizer.state[model.head.bias] = {"step": torch.tensor(9.0)}
        optimizer.step()

    def evaluates_by_other_inputs() -> None:
        with torch.no_grad():
            model(torch.full((4, 6), float(first), dtype=torch.float64))

    def trains_alone() -> None:
        if first:
            model(torch.ones(4, 6, dtype=torch.float64))
        else:
            optimizer.step()

    for mistake in (loads_another_file, resumes_its_optimizer, evaluates_by_other_inputs, trains_alone):
        try:
            mistake()
        except TrainingError as error:
            found[mistake.__name__] = str(error)
    leave_ranks(well=True)
    return found


@pytest.mark.processes
def test_what_one_rank_alone_does_is_a_sentence_on_all():
    for rank, told in enumerate(on_ranks(_on_one_rank_alone, 2)):
        assert "first.weight, which Net loads, is " in told["loads_another_file"]
        assert (
            'the optimizer\'s state is "of 0 parameters, after 0 steps" on rank 1'
            in told["resumes_its_optimizer"]
        )
        assert "call Net with different inputs: rank 1 has others" in told["evaluates_by_other_inputs"]
        alone = [
            "Rank 1 does not call Net in training here",
            'the module that is called is missing on rank 1 and "Net" on rank 0',
        ]
        assert alone[rank] in told["trains_alone"]


class _Weighted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.ones(2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.weights


def _exchanged() -> tuple[list[float], list[str]]:
    """The differences between a divided module and itself when a tensor that is an attribute is exchanged, and what other exchanges are answered with."""
    torch.manual_seed(3)
    plain, x = _Weighted().double(), torch.randn(4, 6, dtype=torch.float64)
    model, told, off = ml.parallel(copy.deepcopy(plain), "tp=2"), list[str](), list[float]()
    for number in range(3):
        plain.weights = model.weights = torch.tensor([1.0, number], dtype=torch.float64)
        off.append(float((model(x) - plain(x)).detach().abs().max()))
    before = model.second.weight
    for name, exchanged in (
        ("weight", torch.nn.Parameter(torch.eye(8).double())),
        ("weight", before),
        ("forward", plain.forward),
    ):
        setattr(model.second if name == "weight" else model, name, exchanged)
        try:
            model(x)
        except TrainingError as error:
            told.append(str(error))
    leave_ranks(well=True)
    return off, told


@pytest.mark.processes
def test_what_is_exchanged_in_a_divided_module_is_computed_with_or_named():
    for off, told in on_ranks(_exchanged, 2):
        assert off == pytest.approx([0.0] * 3, abs=1e-12)
        assert [each.split(" than when")[0] for each in told] == [
            "_Weighted has another second.weight",
            "_Weighted has another forward",
        ]


def _stepped(compiled: bool) -> float:
    """The sum of squares of parameters, of which each rank has a part, after two steps."""
    model = ml.parallel(made(), "dp=2,zero=3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step: Any = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    for _ in range(2):
        model(torch.ones(4, 6, dtype=torch.float64)).square().sum().backward()
        step()
    return sum(float(each.detach().square().sum()) for each in model.parameters())


@pytest.mark.processes
def test_a_compiled_step_of_parts_is_the_step():
    assert on_ranks(_stepped, 2, True, timeout_seconds=200.0) == pytest.approx(
        on_ranks(_stepped, 2, False), rel=1e-12
    )
