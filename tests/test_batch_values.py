"""What a batch holds besides tensors is an input of a program, or what the program is for, or refused by
name: it never stays what it was at first.

Found from outside: `collate` added `"sigma": float(x[0].abs().sum())` and the loss used `m(b["x"] *
b["sigma"])`. Under tp and pp every step computed with the first batch's number, silently; the same with words
that the loss turned into ids.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy
import pytest
import torch

from meshloom.core.errors import CaptureError
from meshloom.program.ir.batch_values import text_of
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.transfer import pack, unpack
from meshloom.program.store.captured_loss import MAX_VALUES, CapturedLoss, _key
from meshloom.train.trainer import Trainer
from tests.loss_jobs import EQUAL, REFUSED, STEPS, Opaque, Task, job_of, job_with
from tests.verified import equals_one_device

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


def check(name: str, plan: str, steps: int = STEPS) -> None:
    equals_one_device(job_with(*EQUAL[name]), plan, steps=steps)


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.slow
def test_what_a_batch_holds_besides_tensors_is_what_it_is_in_every_step(name: str):
    check(name, "tp=2")


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_another_value_in_every_batch_is_refused_by_name(name: str):
    extra, loss, why = REFUSED[name]
    with pytest.raises(CaptureError, match=why), Trainer(job_with(extra, loss), "pp=2", devices="simulated"):
        pass


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.slow
def test_dp_takes_it(name: str):
    extra, loss, _ = REFUSED[name]
    equals_one_device(job_with(extra, loss), "dp=2", steps=3, dtype=None)


def batches_with(name: str, values: list[Any]) -> list[dict[str, Any]]:
    return [
        {"x": torch.full((2, 7), 1.0 + number), "y": torch.tensor([0, number % 5]), name: value}
        for number, value in enumerate(values)
    ]


def programs_of(loss: Any) -> CapturedLoss:
    return CapturedLoss(job_of(loss))


def read(programs: CapturedLoss, batch: Any) -> Any:
    return programs.capture([batch, batch])


@pytest.mark.slow
def test_one_program_takes_all_numbers_and_one_is_read_for_every_text():
    programs = programs_of(
        lambda m, b: (m(b["x"]) * (b["n"] if not isinstance(b["n"], str) else len(b["n"]))).sum()
    )
    one, two = batches_with("n", [0.25, 0.5])
    assert read(programs, one) is read(programs, two) is programs.get(two)
    a, b, again = batches_with("n", ["a", "bb", "a"])
    assert programs.get(a) is None
    assert read(programs, a) is read(programs, again) is not read(programs, b)
    whole = batches_with("n", [1])[0]
    assert programs.get(whole) is None  # an int is no float: int times int is an int
    for batch in (one, a, whole):
        program = read(programs, batch)
        assert unpack(pack(program)).digest() == program.digest()


def test_an_input_may_be_one_number_and_another_a_value():
    programs = programs_of(lambda m, b: (m(b["x"])[:, : b["n"]["width"]] * b["n"]["scale"]).sum())
    batch = batches_with("n", [{"width": 3, "scale": 0.5}])[0]
    assert read(programs, batch).others == {"n.width": "3", "n.scale": "a float"}


def test_reading_for_ever_is_refused():
    """A counter that Python looks at is another one in every step: MAX_VALUES programs are read, and then its
    name is said."""
    programs = programs_of(lambda m, b: m(b["x"]).sum() * (2.0 if b["step"] > 3 else 1.0))
    batches = batches_with("step", list(range(MAX_VALUES + 1)))
    first = read(programs, batches[0])
    for batch in batches[1:-1]:  # as if they had been read
        programs._known[_key(batch, True)].append(
            dataclasses.replace(first, others={"step": text_of(batch["step"])})
        )
    with pytest.raises(
        CaptureError,
        match=f"reads step of the batch, a int, in Python, and it has had {MAX_VALUES} values so far",
    ):
        read(programs, batches[-1])


def test_texts_are_equal_for_equal_values_and_only_for_them():
    values = [
        None,
        True,
        1,
        1.0,
        "1",
        b"1",
        [1],
        (1,),
        {"a": 1},
        {1},
        Task.COPY,
        torch.float32,
        numpy.arange(3),
        numpy.arange(3.0),
        "x" * 300,
        "x" * 301,
    ]
    texts = [text_of(value) for value in values]
    assert None not in texts and len(set(texts)) == len(texts)
    assert text_of([1, Opaque(2.0)]) is None and text_of({"a": {Opaque(1.0)}}) is None
    # None has a text, and hides no object without one
    assert text_of({None, 1}) == "{1, None}" and text_of({None, Opaque(1.0)}) is None


def test_lists_without_tensors_are_one_value():
    leaves = leaves_of(
        {"x": torch.ones(1), "names": ["a", "b"], "scales": [0.5, 1.5], "pair": (torch.ones(1), 3)}
    )
    assert list(leaves.values) == ["names", "scales.0", "scales.1", "pair.1"]
