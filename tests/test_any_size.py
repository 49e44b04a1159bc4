"""One program for all sizes of a batch that a loss is indifferent to, and a large one compared at smaller sizes; where
the loss asks for a size, it is captured at the sizes that come.

Every length of a padded batch used to take a capture of its own, and comparing GPT-2 (124M) at 1,024 tokens with eager
90 of the 100 seconds that a start took.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_unflatten
from torch.utils.data import default_collate

from meshloom.comm.simulated import simulated_groups
from meshloom.core.errors import CaptureError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import KeyedDraws, seed_everything
from meshloom.pipeline.stages import program_store
from meshloom.pipeline.stages.program_store import ProgramStore
from meshloom.program.capture.capture import capture, capture_module
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.program import Program
from meshloom.program.run.execute import run_program
from meshloom.program.sizes import any_size as rules
from meshloom.program.sizes.any_size import captured_by_shapes, shrunk
from meshloom.program.store import captured_loss, checked_capture
from meshloom.program.store.captured_loss import CapturedLoss
from tests.families import FAMILIES

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]

WIDTH, TOKENS = 6, 160
Forward = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """A layer, and whatever `forward` does of [batch, tokens, WIDTH] besides."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.layer, self.places = nn.Linear(WIDTH, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.causal: Tensor
        self.register_buffer("causal", torch.ones(64, 64).tril().bool())
        self.scale = torch.arange(1.0, WIDTH + 1)  # neither parameter nor buffer: a constant of programs
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, self.layer(x))


def loss(model: nn.Module, batch: Any) -> Any:
    found = model(batch["x"]).square()
    if "labelled" in batch:
        return (found * batch["labelled"]).sum() / batch["labelled"].sum()
    return found.sum(), batch["x"].shape[0]


def job_of(forward: Forward) -> Job:
    return Job(
        model=lambda: Model(forward), loss=loss, data=lambda: [0], batch_size=4, steps=1,
        optimizer=lambda named: torch.optim.SGD([each for _, each in named], lr=0.1),
    )  # fmt: skip


def batch_of(samples: int, tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * samples + tokens)
    return {"x": torch.randn(samples, tokens, WIDTH, generator=generator)}


def follow(forward: Forward, sizes: Sequence[tuple[int, int]]) -> list[int]:
    """Captures so far, after each batch: whose program computes what eager does, loss and gradients, bit for
    bit, whatever is drawn."""
    job = job_of(forward)
    (world,) = simulated_groups(1)
    programs, model, found = ProgramStore(job, Plan(), world), job.model(), list[int]()
    for number, batch in enumerate(batch_of(*each) for each in sizes):
        if number == 0:
            programs.open([batch], world, model)
        programs.ready(batch)
        (stage,) = programs.stages(programs.ready(batch).key)
        tensors = dict(model.named_parameters()), dict(model.named_buffers())

        def run(given: Any, stage: Any = stage, tensors: Any = tensors) -> Any:
            return tree_unflatten(run_program(stage.program, tensors[0], tensors[1], given), stage.returned)

        with KeyedDraws():
            wanted = gradients(model, partial(job.loss, model), batch)
        assert gradients(model, run, batch) == wanted
        found.append(sum(each.num_captured for each in programs._captured.values()))
    return found


def gradients(model: nn.Module, run: Callable[[Any], Any], batch: Any) -> list[Any]:
    model.zero_grad()
    seed_everything(3)
    total, weight = run(batch)
    total.backward()
    found = [None if each.grad is None else each.grad.tolist() for each in model.parameters()]
    return [total.item(), weight, *found]


def attention(heads: int, **settings: Any) -> Forward:
    def forward(model: Model, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q = x.view(batch, tokens, heads, width // heads).transpose(1, 2)
        found = F.scaled_dot_product_attention(q, q, q, **settings)
        return found.transpose(1, 2).reshape(batch, tokens, width)

    return forward


def masked(model: Model, x: Tensor) -> Tensor:
    mask = torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool))
    return (x @ x.transpose(1, 2)).masked_fill(~mask, -1e9).softmax(-1) @ x


INDIFFERENT: dict[str, Forward] = {
    "attention": attention(2, is_causal=True),
    "a mask that is made": masked,
    "a mask that is cut out": lambda model, x: (
        (x @ x.transpose(1, 2)).masked_fill(~model.causal[: x.shape[1], : x.shape[1]], 0.0) @ x
    ),
    "places": lambda model, x: x + model.places(torch.arange(x.shape[1])),
    "a share": lambda model, x: x.sum(1) / x.shape[1] + x.mean() / len(x.shape),
    "a number that is filled in": lambda model, x: x + torch.full_like(x, x.shape[1]),
    "shifted": lambda model, x: x[:, 1:] * x[:, :-1],
    "rolled": lambda model, x: x.roll(x.shape[1] // 2, 1),
    "half": lambda model, x: x[:, : x.shape[1] // 2].sum(1),
    "flat": lambda model, x: x.reshape(x.shape[0] * x.shape[1], -1).softmax(0),
    "repeated": lambda model, x: x.repeat(1, 2, 1) @ x.transpose(1, 2),
    "expanded": lambda model, x: x.mean(1, keepdim=True).expand(-1, x.shape[1], -1) * x,
    "padded": lambda model, x: F.pad(x, (0, 0, 2, 1)).cumsum(1),
    "dropout": lambda model, x: model.dropout(x),
    "the first two": lambda model, x: torch.stack([x[:, number] for number in range(2)], 1),
}
ALL: Forward = lambda model, x: torch.stack(  # noqa: E731
    [each(model, x).square().sum() for each in INDIFFERENT.values()]
)
BY_SIZE: dict[str, Forward] = {
    "a root": lambda model, x: x / math.sqrt(x.shape[1]),
    "a power": lambda model, x: x * x.shape[1] ** -0.5,
    "a constant": lambda model, x: x * torch.tensor([1.0 / x.shape[1]]),
    "a list": lambda model, x: x + torch.tensor(list(range(x.shape[1])))[:, None],
    "a loop": lambda model, x: sum((x[:, number] for number in range(x.shape[1])), x[:, 0]),
    "a rounded quotient": lambda model, x: x * (1 / (x.shape[1] // 4)),
    "other operators": lambda model, x: x.tanh() if x.shape[1] % 2 else x,
}
# 6: the width; 4: the batch
SIZES = [(4, 9), (4, 6), (4, 11), (4, 17), (3, 23), (2, 8), (6, 6), (4, 40), (2, 3), (5, 13)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*INDIFFERENT, "all of it"])
def test_three_captures_serve_all_sizes(kind: str):
    captures = follow(INDIFFERENT.get(kind, ALL), SIZES)
    assert captures == [1, 2, *[3] * (len(SIZES) - 2)]


def test_stages_that_are_not_kept_are_built_again_without_captures(monkeypatch: pytest.MonkeyPatch):
    """Of a model with a constant, also of sizes that were captured themselves."""
    monkeypatch.setattr(program_store, "MOST_KEPT", 1)
    found = follow(lambda model, x: x * model.scale, [*SIZES[:5], *SIZES[:4]])
    assert found == [1, 2, *[3] * 7]


@pytest.mark.slow
@pytest.mark.parametrize("kind", BY_SIZE)
def test_where_a_size_becomes_something_else_each_is_captured(kind: str):
    sizes = [(4, 9), (4, 6), (4, 11), (4, 8)]
    assert follow(BY_SIZE[kind], sizes)[-1] >= len(sizes)


@pytest.mark.slow
def test_each_side_of_a_question_has_a_program_of_its_own():
    """Sizes on the other side of one that is asked for are captured for themselves."""
    equal: Forward = lambda model, x: x.tanh() if x.shape[1] == x.shape[2] else x  # noqa: E731  the width, 6
    assert follow(equal, [(4, each) for each in (9, 6, 11, 8, 14, 6, 17)]) == [1, 2, 3, 4, 4, 4, 4]
    longer: Forward = lambda model, x: x.tanh() if x.shape[1] > 16 else x  # noqa: E731
    found = follow(longer, [(4, each) for each in (9, 20, 11, 12, 16, 17, 25, 18, 40, 5)])
    assert found == [1, 2, 3, 4, 4, 5, 6, 6, 6, 6]


@pytest.mark.slow
def test_a_loss_that_is_another_one_at_each_size_is_refused_with_the_dim_that_varies(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(captured_loss, "MAX_SHAPES", 3)
    wanted = (
        r"captured for batches of 3 shapes, and here is another one: dim 1 of x has had 4 sizes \(6, 8, 9, 11, \.\.\.\)\. "
        r"Each needs its own capture, because it asks for sizes at .*test_any_size\.py:\d+ .*\. Pad x in collate to one size"
    )
    with pytest.raises(CaptureError, match=wanted):
        follow(BY_SIZE["a loop"], [(4, 9), (4, 6), (4, 11), (4, 8)])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_captured_by_shapes_is_the_program_that_is_captured_with_values(name: str):
    """With the last samples left out; a family that is refused, or takes other operators then, is none of
    this test's."""
    job = FAMILIES[name].make_job(True)
    data = job.data()
    whole, less = (
        [default_collate([data[at + each] for each in range(size)]) for at in (0, 3)] for size in (3, 2)
    )
    try:
        known, wanted = (capture(job, (each[0], each[1])) for each in (whole, less))
    except CaptureError:
        return
    read: Any = lambda model, batch: capture_module(model, job.loss, [batch])  # noqa: E731
    found = captured_by_shapes(known, job, less[0], read)
    assert found is None or found.digest() == wanted.digest()
    assert found is not None or name != "llama"


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the batches that programs were compared on, where every program is worth comparing at
    smaller ones."""
    found: list[int] = []
    check = checked_capture.check_against_module

    def noted(program: Program, model: nn.Module, loss: Any, batches: Sequence[Any], **settings: Any) -> Any:
        found.append(batches[0]["x"].shape[1])
        return check(program, model, loss, batches, **settings)

    monkeypatch.setattr(checked_capture, "check_against_module", noted)
    monkeypatch.setattr(rules, "MIN_ELEMENTS", 0)
    return found


def capture_long(forward: Forward, labelled: int | None = None) -> Program:
    """labelled: the place whose result counts, alone; default: all."""
    batches = [batch_of(samples, TOKENS) for samples in (2, 2)]
    if labelled is not None:
        for each in batches:
            each["labelled"] = (torch.arange(TOKENS)[:, None] == labelled).expand(2, -1, 1).float()
    return CapturedLoss(job_of(forward)).capture(batches)


def when_exported(model: Model, x: Tensor) -> Tensor:
    """As transformers' models, which leave a causal mask to the attention except where they are exported."""
    if torch.compiler.is_exporting():
        places = torch.arange(x.shape[1])
        mask = (places[:, None] >= places).expand(2, -1, -1).contiguous()
        x = torch.where(mask.any(2, keepdim=True), x, 0.0)
    return x * 2


LONG: dict[str, tuple[Forward, list[int]]] = {
    "indifferent": (INDIFFERENT["places"], [32]),
    "a root": (BY_SIZE["a root"], [TOKENS]),
    # of a length that its windows divide, which 32, 48 and 64 are not
    "windows": (lambda model, x: x.unflatten(1, (-1, 40)).cumsum(2).flatten(1, 2), [80]),
    "another branch": (lambda model, x: x.tanh() if x.shape[1] > 100 else x, [TOKENS]),
    "a parameter as long": (lambda model, x: x + model.places.weight, [TOKENS]),
    # Llama 3 at 4,096 tokens was compared with 112 GiB of activations: the run with symbols took another branch
    "exported": (when_exported, [32]),
}


@pytest.mark.parametrize(
    "kind", ["indifferent", *(pytest.param(each, marks=pytest.mark.slow) for each in LONG)]
)
def test_a_large_program_is_compared_at_the_smallest_sizes_at_which_it_is_the_same(
    kind: str, compared: list[int]
):
    forward, wanted = LONG[kind]
    assert {each.meta.shape for each in capture_long(forward).inputs} == {(2, TOKENS, WIDTH)}
    assert compared == wanted


def test_where_nothing_is_left_to_compare_the_whole_is(compared: list[int]):
    """One place counts, which is none of those that were taken: the loss would be no number on both sides."""
    capture_long(lambda model, x: x.tanh(), labelled=1)
    assert compared[-1] == TOKENS


@pytest.mark.slow
def test_a_program_that_is_not_eager_is_not_used_all_the_same(
    compared: list[int], monkeypatch: pytest.MonkeyPatch
):
    """The fault is planted in what makes a program of what was exported, at all sizes."""
    build = checked_capture.capture_module

    def wrong(*args: Any, **settings: Any) -> Program:
        program = build(*args, **settings)
        for node in program.nodes:
            if node.target is torch.ops.aten.add.Tensor:
                object.__setattr__(node, "target", torch.ops.aten.sub.Tensor)
        return program

    monkeypatch.setattr(checked_capture, "capture_module", wrong)
    with pytest.raises(CaptureError, match="The captured program differs from the model"):
        capture_long(INDIFFERENT["places"])
    assert compared[0] == 32 and TOKENS in compared


def test_of_dims_that_are_equally_long_the_same_places_are_taken():
    x = torch.arange(100).expand(3, 100)
    batch = {"x": x, "mask": x[0][:, None] * 100 + x[0]}
    found = shrunk(leaves_of(batch), {("x", 0): 3, ("x", 1): 4, ("mask", 0): 4, ("mask", 1): 4})
    assert torch.equal(found["x"], torch.tensor([0, 33, 66, 99]).expand(3, 4))
    assert torch.equal(found["mask"][1], 3300 + torch.tensor([0, 33, 66, 99]))
