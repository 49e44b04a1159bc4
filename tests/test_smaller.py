"""A program of a large batch is compared with eager at smaller sizes, if it is proved to be the same there
but for sizes; else at its own.

Comparing GPT-2 (124M) at 1,024 tokens with eager at its own size was 90 of the 100 seconds that a start took.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.errors import CaptureError
from meshloom.core.job import Job
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.program import Program
from meshloom.program.sizes import smaller as rules
from meshloom.program.sizes.smaller import shrunk
from meshloom.program.store import checked_capture as module
from meshloom.program.store.captured_loss import CapturedLoss

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]

TOKENS, WIDTH = 160, 6
Forward = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.embedding, self.places, self.head = (
            nn.Embedding(11, WIDTH),
            nn.Embedding(TOKENS, WIDTH),
            nn.Linear(WIDTH, 11),
        )
        self._forward = forward

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self._forward(self, self.embedding(tokens)))


def with_places(model: Model, x: Tensor) -> Tensor:
    return x + model.places(torch.arange(x.shape[1]))


def job_of(forward: Forward = with_places) -> Job:
    return Job(
        model=lambda: Model(forward),
        loss=lambda model, batch: F.cross_entropy(
            model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
        ),
        optimizer=lambda named: torch.optim.SGD([each for _, each in named], lr=0.1),
        data=lambda: [0],
        batch_size=2,
        steps=1,
    )


def batches(tokens: int = TOKENS, *, labelled: int | None = None) -> list[Any]:
    """labelled: labels after so many places, alone; default: all."""
    found: list[Any] = []
    for seed in range(2):
        drawn = torch.randint(0, 11, (2, 2, tokens), generator=torch.Generator().manual_seed(seed))
        labels = drawn[1].clone()
        if labelled is not None:
            labels[:, :] = -100
            labels[:, labelled] = drawn[1, :, labelled]
        found.append({"tokens": drawn[0], "labels": labels})
    return found


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the batches that programs were compared on, where every program is worth comparing at
    smaller ones."""
    found: list[int] = []
    check = module.check_against_module

    def noted(program: Program, model: nn.Module, loss: Any, batches: Sequence[Any], **settings: Any) -> Any:
        found.append(batches[0]["tokens"].shape[1])
        return check(program, model, loss, batches, **settings)

    monkeypatch.setattr(module, "check_against_module", noted)
    monkeypatch.setattr(rules, "MIN_ELEMENTS", 0)
    return found


@pytest.mark.slow
def test_a_loss_that_is_indifferent_to_its_length_is_compared_at_a_fifth_of_it(sizes: list[int]):
    program = CapturedLoss(job_of()).capture(batches())
    assert sizes == [32]
    assert {each.meta.shape for each in program.inputs} == {(2, TOKENS)}


@pytest.mark.long
def test_a_small_program_is_compared_as_it_is(sizes: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rules, "MIN_ELEMENTS", 2**24)
    CapturedLoss(job_of()).capture(batches())
    assert sizes == [TOKENS]


def scaled(model: Model, x: Tensor) -> Tensor:
    return with_places(model, x) / math.sqrt(x.shape[1])


def in_windows(model: Model, x: Tensor) -> Tensor:
    """Of a length that its windows divide, which 32, 48 and 64 are not."""
    return with_places(model, x).unflatten(1, (-1, 40)).cumsum(2).flatten(1, 2)


def only_long(model: Model, x: Tensor) -> Tensor:
    return with_places(model, x) if x.shape[1] > 100 else x


def with_longest(model: Model, x: Tensor) -> Tensor:
    return x + model.places.weight


@pytest.mark.covering("scaled", "with_longest")
@pytest.mark.parametrize(
    ("forward", "expected"), [(scaled, TOKENS), (in_windows, 80), (only_long, TOKENS), (with_longest, TOKENS)]
)
@pytest.mark.long
def test_the_sizes_are_ones_at_which_it_is_the_same_program(
    forward: Forward, expected: int, sizes: list[int]
):
    """A float made of the length, windows that divide it, another branch, and a parameter as long as the
    text."""
    CapturedLoss(job_of(forward)).capture(batches())
    assert sizes == [expected]


def masked_when_exported(model: Model, x: Tensor) -> Tensor:
    """As transformers' models, which leave a causal mask to the attention except where they are exported."""
    if torch.compiler.is_exporting():
        places = torch.arange(x.shape[1])
        mask = (places[:, None] >= places).expand(2, -1, -1).contiguous()
        x = torch.where(mask.any(2, keepdim=True), x, 0.0)
    return with_places(model, x)


@pytest.mark.slow
def test_the_sizes_are_of_the_branch_that_an_export_takes(sizes: list[int]):
    """Llama 3 at 4,096 tokens could not be compared at smaller sizes, but with 112 GiB of activations: the run with
    symbols took another branch, in which the mask's stride, the square of the length, did not occur."""
    CapturedLoss(job_of(masked_when_exported)).capture(batches())
    assert sizes == [32]


def test_where_nothing_is_left_to_compare_the_whole_is(sizes: list[int]):
    """One labelled place, which is none of those that were taken: the loss would be no number on both
    sides."""
    CapturedLoss(job_of()).capture(batches(labelled=1))
    assert sizes == [32, TOKENS]


@pytest.mark.slow
def test_a_program_that_is_not_eager_is_not_used_all_the_same(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
):
    """The fault is planted in what makes a program of what was exported, at all sizes."""
    build, planted = module.capture_module, 0

    def wrong(*args: Any, **settings: Any) -> Program:
        nonlocal planted
        program = build(*args, **settings)
        nodes = [node for node in program.nodes if node.target is torch.ops.aten.add.Tensor]
        for node in nodes:
            object.__setattr__(node, "target", torch.ops.aten.sub.Tensor)
        planted += len(nodes)
        return program

    monkeypatch.setattr(module, "capture_module", wrong)
    with pytest.raises(CaptureError, match="The captured program differs from the model"):
        CapturedLoss(job_of()).capture(batches(), model=Model(with_places))
    assert planted and sizes[0] == 32 and TOKENS in sizes


def test_of_dims_that_are_equally_long_the_same_places_are_taken():
    x = torch.arange(100).expand(3, 100)
    batch = {"x": x, "mask": x[0][:, None] * 100 + x[0]}
    found = shrunk(leaves_of(batch), {("x", 0): 3, ("x", 1): 4, ("mask", 0): 4, ("mask", 1): 4})
    assert torch.equal(found["x"], torch.tensor([0, 33, 66, 99]).expand(3, 4))
    assert torch.equal(found["mask"][1], 3300 + torch.tensor([0, 33, 66, 99]))
