"""Calls that are alike are read once, and the program is the one that reading all of them gives: the same
digest, of every family and of what is easily got wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured import described
from torch import Tensor, nn

from meshloom.core.job import Job
from meshloom.data.samples import first_batches
from meshloom.program.capture.shapes import capture_shapes
from meshloom.program.ir.program import Program
from meshloom.program.store.captured_loss import CapturedLoss
from meshloom.program.trace.block_calls import Shortcuts
from meshloom.program.trace.folding import Folding
from tests.families import FAMILIES
from tests.families.limits import NOT_READ

pytestmark = pytest.mark.usefixtures("silent_export")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name for every call that was not read."""
    found: list[str] = []
    stand_in = Folding._repeat

    def noted(self: Folding, other: Any, block: Any, leaves: Any) -> Any:
        found.append(type(block.parts[""]).__name__)
        return stand_in(self, other, block, leaves)

    monkeypatch.setattr(Folding, "_repeat", noted)
    return found


def whole(read: Callable[[Shortcuts], Program]) -> Program:
    return read(Shortcuts(fold=False))


def both_readings(monkeypatch: pytest.MonkeyPatch, job: Job, batch: Any) -> tuple[Program, Program]:
    folded = capture_shapes(job, batch)
    with monkeypatch.context() as patched:
        patched.setattr("meshloom.program.capture.shapes.with_shortcuts", whole)
        return folded, capture_shapes(job, batch)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(NOT_READ)))
@pytest.mark.slow
def test_every_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = FAMILIES[name].make_job(True)
    (batch,) = first_batches(job, 1, job.batch_size)
    folded, unfolded = both_readings(monkeypatch, job, batch)
    assert described(folded) == described(unfolded)
    assert folded.digest() == unfolded.digest()


class Stack(nn.Module):
    """Blocks one after another. x, result: [samples, 6]."""

    def __init__(self, make: Callable[[int], nn.Module], count: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)  # so that all blocks are given what has a gradient
        self.blocks = nn.ModuleList(make(number) for number in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    """A gated unit. number: its place, which nothing looks at."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.up, self.norm, self.drop = nn.Linear(6, 12), nn.LayerNorm(6), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        return x + self.drop(gate.sigmoid() * value)


class Scaled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.number + 1)


class Noting(Block):
    """Leaves a loss of its own behind, which the loss of the model adds."""

    def forward(self, x: Tensor) -> Tensor:
        self.aside = x.square().mean()
        return super().forward(x)


class Writing(Block):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return super().forward(x)


class Viewing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, 2, 3).flatten(1)


class Normed(nn.Module):
    """With running statistics, a counter and a buffer that is written."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.body(x - self.mean)


class Cast(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Several(Block):
    """Gives more than one tensor, one of them what it was given, and a number."""

    def forward(self, x: Any) -> Any:
        x, before, _ = x if isinstance(x, tuple) else (x, x, 0)
        return super().forward(x), before, 3


class Nested(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(Block(0), Block(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Again(nn.Module):
    """One block, called three times."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(6, 6), block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(self.block(self.first(x))))


def hooked(number: int) -> nn.Module:
    block = Block(number)
    block.up.register_forward_hook(lambda module, args, result: result * (number + 1))
    return block


def job_of(make: Callable[[], nn.Module]) -> Job:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        result = model(batch.clone())
        result = result[0] if isinstance(result, tuple) else result
        return result.square().mean() + sum(getattr(each, "aside", 0.0) for each in model.modules())

    return Job(
        model=make,
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=lambda: [torch.ones(6)] * 8,
        batch_size=4,
        steps=1,
    )


FOLDED = {
    "blocks": (lambda: Stack(Block), ["Block"] * 2),
    "nested": (lambda: Stack(Nested), ["Block", "Nested", "Nested"]),
    "casts": (lambda: Stack(Cast), ["Cast"] * 2),
    "buffers": (lambda: Stack(Normed), ["Normed"] * 2),
    "called again": (lambda: Again(Block(0)), ["Block"] * 2),
    "tied": (lambda: tied(Stack(Block)), ["Block"] * 2),
}
READ = {
    "index looked at": lambda: Stack(Scaled),
    "attribute left behind": lambda: Stack(Noting),
    "input written": lambda: Stack(Writing),
    "view of the input": lambda: Stack(Viewing),
    "hooks inside": lambda: Stack(hooked),
    "buffers written again": lambda: Again(Normed(0)),
    "one module shared": lambda: shared(Stack(Block)),
    "other sizes": lambda: nn.Sequential(
        Block(0),
        nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
        nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh()),
    ),
}


def shared(stack: Stack) -> Stack:
    """All blocks have the first one's layer; export has stand-ins for modules then, and the model could not
    be read at all."""
    blocks: Any = stack.blocks
    for block in blocks:
        block.up = blocks[0].up
    return stack


def tied(stack: Stack) -> Stack:
    """The last block has the first one's weight."""
    blocks: Any = stack.blocks
    blocks[2].up.weight = blocks[0].up.weight
    return stack


@pytest.mark.covering("blocks", "tied", "buffers")
@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.long
def test_is_read_once(name: str, monkeypatch: pytest.MonkeyPatch, counted: list[str]) -> None:
    make, names = FOLDED[name]
    folded, unfolded = both_readings(monkeypatch, job_of(make), torch.ones(4, 6))
    assert described(folded) == described(unfolded)
    assert folded.digest() == unfolded.digest()
    assert counted == names


@pytest.mark.covering("input written", "index looked at")
@pytest.mark.parametrize("name", READ)
@pytest.mark.long
def test_is_read_as_often_as_it_is_called(
    name: str, monkeypatch: pytest.MonkeyPatch, counted: list[str]
) -> None:
    folded, unfolded = both_readings(monkeypatch, job_of(READ[name]), torch.ones(4, 6))
    assert folded.digest() == unfolded.digest()
    assert not counted


@pytest.mark.slow
def test_what_a_call_inside_would_have_looked_at_counts(
    monkeypatch: pytest.MonkeyPatch, counted: list[str]
) -> None:
    """Two pairs of blocks, and the last divides by another number: the second pair is not like the first,
    whose second block was not read."""

    def pair(*numbers: int) -> nn.Module:
        return nn.Sequential(*map(Scaled, numbers))

    folded, unfolded = both_readings(
        monkeypatch, job_of(lambda: Stack(lambda number: pair(1, 1 + number), 2)), torch.ones(4, 6)
    )
    assert folded.digest() == unfolded.digest()
    assert counted == ["Scaled"] * 2


@pytest.mark.slow
def test_several_results(monkeypatch: pytest.MonkeyPatch, counted: list[str]) -> None:
    """The first call is given one tensor, the others three values: the third is like the second."""
    folded, unfolded = both_readings(monkeypatch, job_of(lambda: Stack(Several, 4)), torch.ones(4, 6))
    assert folded.digest() == unfolded.digest()
    assert counted == ["Several"] * 2


@pytest.mark.slow
def test_what_leaks_out_of_a_block_is_read_anew(monkeypatch: pytest.MonkeyPatch, counted: list[str]) -> None:
    """A forward that puts a value where nobody sees it: in a list outside of the model."""
    seen: list[Tensor] = []

    class Telling(Block):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.mean())
            return super().forward(x)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        seen.clear()
        total = model(batch).sum() + torch.stack(seen).sum()
        seen.clear()
        return total

    job = Job(
        model=lambda: Stack(Telling),
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named),
        data=lambda: [torch.ones(6)],
        batch_size=1,
        steps=1,
    )
    folded, unfolded = both_readings(monkeypatch, job, torch.ones(4, 6))
    assert counted == ["Telling"] * 2
    assert folded.digest() == unfolded.digest()
    assert sum(node.operator == "mean" for node in folded.nodes) == 3


# --- Caches for generating text.


def language_model(loss: Callable[[nn.Module, Tensor], Tensor], **settings: Any) -> Job:
    """A GPT-2 of three layers; as its configuration is by default, it fills a cache of keys and values."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=31, n_embd=24, n_layer=3, n_head=3, n_positions=8, **settings)
    return Job(
        model=lambda: transformers.GPT2LMHeadModel(config).eval(),
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named),
        data=lambda: [torch.ones(8, dtype=torch.long)],
        batch_size=1,
        steps=1,
    )


def own_loss(model: Any, words: Tensor) -> Tensor:
    return model(input_ids=words, labels=words).loss


@pytest.mark.slow
def test_layers_are_read_once_although_each_fills_its_place_in_a_cache(counted: list[str]) -> None:
    """Found at real sizes: with `use_cache=True`, the default, LLaMA-70B took 40 s to read instead of 7."""
    words = torch.ones(2, 8, dtype=torch.long)
    job = language_model(own_loss)
    config = job.model().config
    program = capture_shapes(job, words)
    assert counted.count("GPT2Block") == 2
    assert config.use_cache
    assert program.digest() == capture_shapes(language_model(own_loss, use_cache=False), words).digest()


@pytest.mark.slow
def test_a_loss_that_looks_at_the_cache_has_one() -> None:
    def loss(model: Any, words: Tensor) -> Tensor:
        result = model(input_ids=words, labels=words)
        return result.loss + result.past_key_values.layers[1].keys.square().mean()

    job = language_model(loss)
    words = [torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    program = CapturedLoss(job).capture(words)
    assert program.digest() != CapturedLoss(language_model(own_loss)).capture(words).digest()


@pytest.mark.slow
def test_a_model_that_computes_something_else_with_a_cache_is_found_out() -> None:
    """Only the comparison with eager can know."""

    class Config:
        use_cache = True

        def __init__(self) -> None:
            self.use_cache = True

    class Doubling(Block):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.config = Config()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2 if self.config.use_cache else 1)

    job = job_of(lambda: Stack(Doubling))
    program = CapturedLoss(job).capture([torch.randn(4, 6), torch.randn(4, 6)])
    doubled = [node for node in program.nodes if node.operator == "mul.Tensor" and node.args[1] == 2]
    assert len(doubled) == 3
