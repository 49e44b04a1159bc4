"""Loops of one's own, as their authors write them: each returns numbers that must not depend on the number of ranks."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import meshloom as ml
from meshloom.loops.ranks import leave_ranks, ranks
from meshloom.loops.taken_shares import TakenShare, share_sizes, took

F64 = torch.float64
CASES: dict[str, Callable[[], list[Any]]] = {}


def case(function: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    CASES[function.__name__] = function
    return function


def all_cases(plan: str | None = None) -> dict[str, list[Any] | str]:
    """On this rank; of a case that the plan refuses, the sentence."""
    found: dict[str, list[Any] | str] = {}
    ranks(plan)
    try:
        for name, function in CASES.items():
            random.seed(0)
            numpy.random.seed(0)
            torch.manual_seed(0)
            try:
                found[name] = [float(each) for each in function()]
            except (ml.MeshloomError, RuntimeError) as error:
                found[name] = str(error)
    finally:
        leave_ranks(well=len(found) == len(CASES))
    return found


class Net(nn.Module):
    """Three layers. recompute: how the second one's activations are kept."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.recompute:
            h = checkpoint(self._second, h, use_reentrant=self.recompute == "reentrant")
        else:
            h = self._second(h)
        return self.head(h)

    def short(self, x: Tensor) -> Tensor:
        """A way through the model that is not its forward."""
        return self.head(torch.tanh(self.first(x)))

    def _second(self, h: Tensor) -> Tensor:
        return torch.tanh(self.second(h))


class Counted(Net):
    """calls: of its forward, which a script may read."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def made(recompute: str = "") -> Net:
    torch.manual_seed(3)
    return Net(recompute).to(F64)


def batches(steps: int = 5) -> Iterator[tuple[Tensor, Tensor]]:
    """This replica's shares of batches of 7 and 8 samples: uneven for two replicas and for three."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        x = torch.randn(7 + step % 2, 6, generator=generator, dtype=F64)
        y = torch.randint(0, 2, (len(x),), generator=generator)
        yield shared(x), shared(y)


def shared(x: Tensor) -> Tensor:
    share = TakenShare(share_sizes(len(x), ranks().plan.dp), ranks().replica)
    rows = x[share.start : share.start + share.rows]
    took(share, rows)
    return rows


def size_of(model: nn.Module) -> Tensor:
    return torch.stack([each.detach().square().sum() for each in model.parameters()]).sum()


def trained(
    model: nn.Module, loss_of: Callable[[Any, Tensor, Tensor], Tensor], optimizer: torch.optim.Optimizer | None = None
) -> list[Any]:  # fmt: skip
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = list[Any]()
    for x, y in batches():
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
    return [*seen, size_of(model)]


def entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@case
def optimizer_made_before() -> list[Any]:
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return trained(ml.parallel(model), entropy, optimizer)


@case
def recomputed() -> list[Any]:
    return trained(ml.parallel(made("non-reentrant")), entropy)


@case
def recomputed_by_a_backward_within() -> list[Any]:
    return trained(ml.parallel(made("reentrant")), entropy)


@case
def penalty_on_parameters() -> list[Any]:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return entropy(model, x, y) + 0.1 * sum(each.pow(2).sum() for each in model.parameters())

    return trained(ml.parallel(made()), loss_of)


@case
def penalty_on_gradients_of_inputs() -> list[Any]:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        results = model(x)
        (slope,) = torch.autograd.grad(results.sum(), x, create_graph=True)
        return F.cross_entropy(results, y) + (slope.norm(dim=1) - 1).square().mean()

    return trained(ml.parallel(made()), loss_of)


@case
def sum_of_samples() -> list[Any]:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return ml.sum(F.cross_entropy(model(x), y, reduction="sum")) / 7

    return trained(ml.parallel(made()), loss_of)


@case
def total_by_count() -> list[Any]:
    """A mean over what a batch has of one class, of which a share may have none."""

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        chosen = (y == 1).to(F64)
        of_each = F.cross_entropy(model(x), y, reduction="none")
        return ml.mean((of_each * chosen).sum(), chosen.sum())

    return trained(ml.parallel(made()), loss_of)


@case
def pairs_of_samples() -> list[Any]:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        results, labels = ml.gather(model(x)), ml.gather(y)
        return (results @ results.T).logsumexp(1).mean() + F.cross_entropy(results, labels)

    return trained(ml.parallel(made()), loss_of)


@case
def rows_of_a_share_against_all() -> list[Any]:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        mine = model(x)
        return (mine @ ml.gather(mine).T).logsumexp(1).mean()

    return trained(ml.parallel(made()), loss_of)


@case
def a_method_that_trains() -> list[Any]:
    model = ml.parallel(made())
    return trained(model, lambda model, x, y: F.cross_entropy(model.short(x), y))


class Stepping(Net):
    """A method that makes whole steps, another that reads a parameter of the module itself, and calls within calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def short(self, x: Tensor) -> Tensor:
        return self(x) + self.scale * super().short(x)

    def step(self, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> list[float]:
        found = list[float]()
        for _ in range(2):
            loss = F.cross_entropy(self.short(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(ml.mean(loss.detach())))
        return found


@case
def a_method_beside_the_forward() -> list[Any]:
    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return entropy(model, x, y) + F.cross_entropy(model.short(x), y)

    return trained(ml.parallel(made(), methods=["short"]), loss_of)


@case
def methods_that_step() -> list[Any]:
    torch.manual_seed(3)
    model = ml.parallel(Stepping().to(F64), methods=["short", "step"], divide="outermost")
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), list[Any]()
    for x, y in batches():
        seen += model.step(x, y, optimizer)
        optimizer.zero_grad()
        F.cross_entropy(model.short(x), y).backward()
        optimizer.step()
    return [*seen, size_of(model)]


class Drawing(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x + torch.randn_like(x), 0.2))


@case
def a_forward_that_draws() -> list[Any]:
    """What it draws is no plan's; that ranks draw alike is compared before each step."""
    torch.manual_seed(3)
    return [float(len(trained(ml.parallel(Drawing().to(F64)), entropy)))]


@case
def mean_as_the_loss() -> list[Any]:
    return trained(ml.parallel(made()), lambda model, x, y: ml.mean(entropy(model, x, y)))


@case
def several_backwards() -> list[Any]:
    model = ml.parallel(made())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches()):
        loss = entropy(model, x, y)
        (loss / 3).backward(retain_graph=True)
        if number % 2:  # else it adds to what the next ones give
            (2 * loss / 3).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=number > 1)
    return [size_of(model)]


@case
def accumulated() -> list[Any]:
    model = ml.parallel(made())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        with ml.accumulate(model):
            entropy(model, x, y).backward()
            model.short(x).square().mean().backward()
        model.second.weight.square().sum().backward()
        optimizer.step()
    return [size_of(model)]


@case
def gradients_that_are_kept() -> list[Any]:
    model, kept = ml.parallel(made()), list[Tensor | None]()
    for x, y in batches():
        model.zero_grad()
        entropy(model, x, y).backward()
        kept += [each.grad for each in model.parameters()]
    return [each.square().sum() for each in kept if each is not None]


@case
def the_next_batch_before_backward() -> list[Any]:
    model = ml.parallel(made())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, coming = list[Any](), batches()
    x, y = next(coming)
    for following in coming:
        optimizer.zero_grad()
        loss = entropy(model, x, y)
        x, y = following
        loss.backward()
        seen.append(float(ml.mean(loss.detach())))
        optimizer.step()
    return [*seen, size_of(model)]


@case
def closure() -> list[Any]:
    model = ml.parallel(made())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
    x, y = next(batches())

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = entropy(model, x, y)
        loss.backward()
        return loss

    return [*(optimizer.step(evaluate) for _ in range(3)), size_of(model)]


@case
def optimizers_of_whole_parameters() -> list[Any]:
    model = made()
    muon = torch.optim.Muon([each for each in model.parameters() if each.dim() == 2], lr=0.1)
    model = ml.parallel(model)
    muon = ml.whole(muon)
    scheduler = torch.optim.lr_scheduler.StepLR(muon, 2)
    lbfgs = ml.whole(torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe"))
    seen = list[Any]()
    for x, y in batches():

        def evaluate(x: Tensor = x, y: Tensor = y) -> Tensor:
            lbfgs.zero_grad()
            loss = entropy(model, x, y)
            loss.backward()
            return loss

        seen.append(lbfgs.step(evaluate).detach())
        entropy(model, x, y).backward()
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        muon.step()
        scheduler.step()
        muon.load_state_dict(copy.deepcopy(muon.state_dict()))
    return [*seen, size_of(model)]


@case
def frozen_added_averaged_copied() -> list[Any]:
    torch.manual_seed(3)
    model = ml.parallel(Counted().to(F64))
    model.second.requires_grad_(False)
    average, last = AveragedModel(model), nn.Identity()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for number, (x, y) in enumerate(batches()):
        if number == 2:
            model.second.requires_grad_(True)
        if number == 3:
            added = nn.Linear(2, 2).to(F64)
            nn.init.constant_(added.weight, 0.3)
            nn.init.constant_(added.bias, 0.1)
            model.last = last = added
            optimizer.add_param_group({"params": last.parameters()})
        results = model(x)
        optimizer.zero_grad()
        F.cross_entropy(last(results), y).backward()
        optimizer.step()
        if number < 3:
            average.update_parameters(model)
    copied = copy.deepcopy(model)
    assert type(copied) is Counted and isinstance(model, Counted) and type(model).__name__ == "Counted"
    return [size_of(model), size_of(average), size_of(copied), copied.calls]


@case
def two_models() -> list[Any]:
    torch.manual_seed(5)
    maker = ml.parallel(nn.Linear(4, 6).to(F64))
    judge = ml.parallel(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).to(F64))
    of_maker, of_judge = (torch.optim.Adam(each.parameters(), lr=1e-2) for each in (maker, judge))

    def judged(x: Tensor, truth: float) -> Tensor:
        results = judge(x)
        return F.binary_cross_entropy_with_logits(results, torch.full_like(results, truth))

    for number, (x, _) in enumerate(batches()):
        made_up = maker(shared(torch.randn(7 + number % 2, 4, dtype=F64)))
        of_judge.zero_grad()
        judged(x, 1.0).backward()
        judged(made_up.detach(), 0.0).backward()
        of_judge.step()
        of_maker.zero_grad()
        judged(made_up, 1.0).backward()  # gradients of the judge, too, which nobody uses
        of_maker.step()
    return [size_of(maker), size_of(judge)]


@case
def running_statistics() -> list[Any]:
    """Every share of one size, normalised by itself: the merged statistics are those of calls one after another, so only their
    number is alike under all plans."""
    model = ml.parallel(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).to(F64))
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d) and norm.num_batches_tracked is not None
    for x, _ in batches():
        model(x).square().mean().backward()
    counted = int(norm.num_batches_tracked)
    alike = ml.gather([float(norm.running_mean.sum())]) if norm.running_mean is not None else []
    plan = ranks().plan
    return [counted / (plan.dp * plan.microbatches), len(set(alike))]


@case
def compiled_around() -> list[Any]:
    return trained(torch.compile(ml.parallel(made()), backend="eager"), entropy)  # pyright: ignore[reportArgumentType]


@case
def compiled_in_place() -> list[Any]:
    model = ml.parallel(made())
    model.compile(backend="eager")
    return trained(model, entropy)


@case
def numbers_of_the_batch() -> list[Any]:
    x, _ = next(batches())
    share = len(x) if ranks().plan.dp < 7 else 0
    return [ml.sum(share), ml.mean(float(x.sum()) / len(x)), len(ml.gather(x)), *ml.sum([share, 2 * share])]
