"""Replicas that step by themselves: rounds against plain loops, and what is seen of the model in the middle
of one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshloom.core.errors import PlanError, TrainingError
from meshloom.core.job import Evaluate, Job
from meshloom.core.plan import Plan
from meshloom.data.chunks import Chunk
from meshloom.exchange.diloco import outer_of
from meshloom.exchange.local_sgd import TakeMean
from meshloom.replica.replica_state import full_state
from meshloom.train.trainer import Trainer
from meshloom.verify.run import verify
from tests.fitted import fitted
from tests.jobs import GPT, class_loss, make_job, vectors
from tests.verified import equals_one_device, report_on

SLOW = pytest.mark.slow
Parameters = dict[str, Tensor]


def trained(job: Job, plan: str, **settings: Any) -> Parameters:
    """Parameters after all steps, float64."""
    with Trainer(job, plan, devices="simulated", dtype=torch.float64, **settings) as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
        return whole(trainer)


def whole(trainer: Trainer) -> Parameters:
    """Copies of the whole parameters and buffers."""
    return {name: each.clone().cpu() for name, each in trainer.together(full_state)[0].items()}


def assert_near(found: Parameters, expected: Parameters, rtol: float = 1e-11) -> None:
    """Equal up to the order of sums in float64."""
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        torch.testing.assert_close(
            found[name], want, rtol=rtol, atol=rtol, msg=lambda text, name=name: f"{name}: {text}"
        )


# --- Against plain loops.


def shares(job: Job, dp: int) -> list[list[list[Chunk]]]:
    """The chunks of each step and replica."""
    with Trainer(job, f"dp={dp}", devices="simulated", dtype=torch.float64) as trainer:
        return [batch.shares for batch in trainer.batches() if [trainer.step(batch)]]


def plain(
    job: Job, dp: int, local_steps: int, *, outer: tuple[float, float] | None = None
) -> tuple[Parameters, list[float]]:
    """Parameters and losses of as many models as there are replicas, by torch alone. outer: learning rate and
    momentum of torch's Nesterov SGD."""
    with Trainer(job, "dp=1", devices="simulated", dtype=torch.float64) as trainer:
        start = copy.deepcopy(trainer.replicas[0].model).cpu()
    models = [copy.deepcopy(start) for _ in range(dp)]
    optimizers: list[Any] = [job.optimizer(list(model.named_parameters())) for model in models]
    schedulers: list[Any] = [job.scheduler(each) for each in optimizers] if job.scheduler else []
    steps = shares(job, dp)
    outer_optimizer = (
        torch.optim.SGD(start.parameters(), lr=outer[0], momentum=outer[1], nesterov=outer[1] > 0)
        if outer
        else None
    )
    losses: list[float] = []
    for step, by_replica in enumerate(steps):
        total = weight = 0.0
        for model, optimizer, chunks in zip(models, optimizers, by_replica, strict=True):
            optimizer.zero_grad()
            data = chunks[0].data
            if not chunks[0].samples:
                optimizer.step()  # without gradients it does nothing
                continue
            data = {key: each.double() if each.is_floating_point() else each for key, each in data.items()}
            returned = job.loss(model, data)
            loss = returned[0] / returned[1] if isinstance(returned, tuple) else returned
            count = float(returned[1]) if isinstance(returned, tuple) else chunks[0].samples
            loss.backward()
            total, weight = total + float(loss.detach()) * count, weight + count
            if job.clip_grad_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_grad_norm)
            optimizer.step()
        losses.append(total / weight)
        for scheduler in schedulers:
            scheduler.step()
        if (step + 1) % local_steps and step + 1 < len(steps):
            continue
        for parameter, *theirs in zip(
            start.parameters(), *(model.parameters() for model in models), strict=True
        ):
            mean = torch.stack([each.detach() for each in theirs]).mean(0)
            if outer_optimizer:
                parameter.grad = parameter.detach() - mean
            else:
                parameter.data.copy_(mean)
        if outer_optimizer:
            outer_optimizer.step()
        for model in models:
            model.load_state_dict(start.state_dict())
    return {name: each.detach() for name, each in start.named_parameters()}, losses


def steady(optimizer: str, **settings: Any) -> Job:
    """A GPT without dropout, whose loss counts tokens; three uneven shares."""
    return replace(
        make_job("gpt", optimizer, **{"batch_size": 7, "steps": 5, **settings}),
        model=lambda: GPT(dropout=0.0),
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "job",
    [make_job("mlp", "sgd", batch_size=13, steps=5), steady("adamw")],
    ids=["mlp-sgd-clipped", "gpt-adamw"],
)
def test_local_sgd_is_the_plain_loop(job: Job) -> None:
    expected, losses = plain(job, 3, 2)
    with Trainer(
        job, "dp=3,exchange=local_sgd,local_steps=2", devices="simulated", dtype=torch.float64
    ) as trainer:
        found = [trainer.step(batch) for batch in trainer.batches()]
        assert_near(whole(trainer), expected)
    # the mean over all samples, each under its replica's parameters
    assert found == pytest.approx(losses, rel=1e-11)


@pytest.mark.parametrize("outer", [(0.7, 0.9), (1.0, 0.0), (0.5, 0.0)])
@pytest.mark.long
def test_diloco_is_the_plain_loop(outer: tuple[float, float]) -> None:
    job = make_job("mlp", "adamw", batch_size=13, steps=7)
    expected, _ = plain(job, 3, 3, outer=outer)
    found = trained(
        job, f"dp=3,exchange=diloco,local_steps=3,outer_learning_rate={outer[0]},outer_momentum={outer[1]}"
    )
    assert_near(found, expected)


def test_without_an_outer_optimizer_diloco_is_local_sgd() -> None:
    job = make_job("mlp", "sgd", batch_size=13, steps=4)
    found = trained(job, "dp=2,exchange=diloco,local_steps=2,outer_learning_rate=1,outer_momentum=0")
    assert_near(found, trained(job, "dp=2,exchange=local_sgd,local_steps=2"))


def even_sgd(**settings: Any) -> Job:
    """Momentum, a schedule and weight decay; equal shares and no clipping."""
    job = make_job("mlp", "sgd", clip_grad_norm=None, drop_last=True, **settings)
    return replace(
        job, optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, weight_decay=0.01)
    )


@pytest.mark.parametrize("dp", [2, 3, 4])
@pytest.mark.slow
def test_one_local_step_is_all_reduce(dp: int) -> None:
    """For SGD with momentum the mean of the updates is the update of the mean."""
    equals_one_device(even_sgd(), Plan(dp=dp, exchange="local_sgd"), steps=3)
    job = even_sgd(steps=6)
    assert_near(trained(job, f"dp={dp},exchange=local_sgd"), trained(job, f"dp={dp}"))


@pytest.mark.slow
def test_one_local_step_with_uneven_shares_is_a_mean_of_means_which_differs() -> None:
    report = report_on(replace(even_sgd(), batch_size=13), Plan(dp=3, exchange="local_sgd"), steps=1)
    assert not report.passed


# --- Shares, stages, parts.


@pytest.mark.long
def test_a_replica_without_samples_keeps_its_parameters_until_the_mean() -> None:
    job = make_job("mlp", "adamw", batch_size=2, steps=3, data=lambda: vectors(6))
    expected, _ = plain(job, 3, 3)
    assert_near(trained(job, "dp=3,exchange=local_sgd,local_steps=3"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["local_sgd", "diloco"])
@pytest.mark.parametrize("inner", ["pp=2", "tp=2", "pp=2,tp=2"])
@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_a_divided_replica_steps_like_a_whole_one(exchange: str, inner: str, optimizer: str) -> None:
    job = steady(optimizer, batch_size=12)
    plan = f"dp=2,microbatches=2,exchange={exchange},local_steps=2"
    # float64; momentum and Newton-Schulz enlarge rounding
    assert_near(trained(job, f"{plan},{inner}"), trained(job, plan), rtol=1e-8)


# --- Between means.


class Halfway:
    """A run of seven steps in rounds of three that evaluates and saves where it is told to."""

    def __init__(self, exchange: str, out: Path | None = None) -> None:
        job = make_job("mlp", "adamw", batch_size=13, steps=7)
        self.job = replace(job, evaluate=Evaluate(lambda: vectors(20), {"loss": class_loss}, every=1))
        self.plan = f"dp=3,exchange={exchange},local_steps=3"
        self.out = out

    def run(
        self, *, evaluate: bool = False, save_after: int = 0, resume: Path | None = None
    ) -> Iterator[tuple[float, Trainer]]:
        """The loss of every step."""
        with Trainer(
            self.job, self.plan, devices="simulated", dtype=torch.float64, out=self.out, resume=resume
        ) as trainer:
            for batch in trainer.batches():
                loss = trainer.step(batch)
                if evaluate:
                    trainer.evaluate()
                if trainer.next_step == save_after:
                    trainer.save()
                yield loss, trainer


@pytest.mark.parametrize("exchange", ["local_sgd", "diloco"])
def test_replicas_differ_within_a_round_and_are_one_after_it_and_at_the_end(exchange: str) -> None:
    same = []
    for _, trainer in Halfway(exchange).run():
        heads = [replica.model.get_parameter("head.weight") for replica in trainer.replicas]
        same.append(torch.equal(heads[0], heads[1]) and torch.equal(heads[1], heads[2]))
    assert same == [False, False, True, False, False, True, True]


@pytest.mark.parametrize("exchange", ["local_sgd", "diloco"])
@pytest.mark.long
def test_evaluation_looks_at_the_mean_and_changes_nothing(exchange: str) -> None:
    expected = [loss for loss, _ in Halfway(exchange).run()]
    found = []
    for loss, trainer in Halfway(exchange).run(evaluate=True):
        found.append(loss)
        means = {
            name: torch.stack(
                [replica.model.get_parameter(name).detach() for replica in trainer.replicas]
            ).mean(0)
            for name, _ in trainer.replicas[0].model.named_parameters()
        }
        data = vectors(20)
        mean_model = copy.deepcopy(trainer.replicas[0].model).cpu()
        mean_model.load_state_dict(means)
        wanted = float(
            class_loss(mean_model, {"x": data.fields["x"].double(), "y": data.fields["y"]}).detach()
        )
        assert trainer.evaluate()["loss"] == pytest.approx(wanted, rel=1e-12)
    assert found == expected


@pytest.mark.parametrize("exchange", ["local_sgd", "diloco"])
@pytest.mark.parametrize("save_after", [3, 4, 5])
@pytest.mark.long
def test_a_save_ends_the_round_and_a_resumed_run_goes_on_as_the_saving_one(
    exchange: str, save_after: int, tmp_path: Path
) -> None:
    run = Halfway(exchange, tmp_path)
    losses, ends = [], {}
    for loss, trainer in run.run(save_after=save_after):
        losses.append(loss)
        ends = whole(trainer)
    resumed, ended = [], {}
    for loss, trainer in run.run(resume=tmp_path):
        resumed.append(loss)
        ended = whole(trainer)
    assert resumed == losses[save_after:]
    assert all(torch.equal(ends[name], ended[name]) for name in ends)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor", "muon"])
@pytest.mark.parametrize("exchange", ["local_sgd", "diloco"])
def test_checkpoints_go_to_and_come_from_any_plan(exchange: str, optimizer: str, tmp_path: Path) -> None:
    job = steady(optimizer, batch_size=12, steps=8)
    local = f"dp=3,exchange={exchange},local_steps=2"
    chain = [
        "dp=2,microbatches=2",
        local,
        "dp=2,zero=1",
        local.replace("dp=3", "dp=2,tp=2"),
        local,
        "dp=2,exchange=server,servers=2",
    ]
    for number, plan in enumerate(chain):
        resume = tmp_path if number else None
        with Trainer(
            job, plan, devices="simulated", steps=number + 1, out=tmp_path, resume=resume, dtype=torch.float64
        ) as trainer:
            summary = trainer.fit()
            assert summary.predicted == summary.counted, plan
            saved = whole(trainer)
        with Trainer(job, "dp=2", devices="simulated", resume=tmp_path, dtype=torch.float64) as trainer:
            assert_near(whole(trainer), saved, rtol=0)


@pytest.mark.slow
def test_the_outer_momentum_is_saved_whole_where_parameters_are_divided(tmp_path: Path) -> None:
    job = steady("sgd", batch_size=12, steps=6)
    plan = "dp=2,microbatches=2,exchange=diloco,local_steps=2"
    straight = trained(job, plan, steps=6)
    fitted(job, f"{plan},tp=2", steps=2, out=tmp_path, dtype=torch.float64)
    # the optimizer's state was averaged by the save
    assert_near(trained(job, plan, resume=tmp_path), straight, rtol=1e-4)
    with Trainer(job, plan, devices="simulated", resume=tmp_path, dtype=torch.float64) as trainer:
        outer = outer_of(trainer.replicas[1].exchange)
        momentum = outer.momentum if outer else {}
        assert momentum and momentum.keys() == dict(trainer.replicas[1].model.named_parameters()).keys()
        assert momentum["blocks.0.qkv.weight"].abs().max() > 0


# --- Bytes, refusals, mistakes.


@pytest.mark.parametrize(
    ("model", "inner"),
    [("cnn", ""), pytest.param("gpt", ",pp=2", marks=SLOW), pytest.param("gpt", ",tp=2", marks=SLOW)],
)
@pytest.mark.long
def test_parameters_travel_once_a_round_and_bytes_are_predicted(
    model: str, inner: str, tmp_path: Path
) -> None:
    job = make_job(model, "adamw", steps=7, drop_last=True, clip_grad_norm=1.0, checkpoint_every=4)
    job = replace(job, evaluate=Evaluate(job.data, {"loss": job.loss}, every=5))
    with Trainer(
        job, f"dp=2,exchange=local_sgd,local_steps=4{inner}", devices="simulated", out=tmp_path
    ) as trainer:
        summary = trainer.fit()
        assert summary.predicted == summary.counted
        assert trainer.replicas[0].exchange.expected_bytes().so_far.total("dp") == 3 * 4 * sum(
            each.numel() for _, each in trainer.replicas[0].named
        )  # 2 rounds, 1 look


def test_verification_names_local_steps() -> None:
    for text, named in (("diloco", "exchange=diloco"), ("async", "staleness=inf")):
        with pytest.raises(PlanError, match=rf"^{named}: such a plan does not promise"):
            verify(even_sgd(), Plan.parse(f"dp=2,exchange={text}"), devices="simulated")


def test_a_parameter_left_out_of_the_mean_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    end = TakeMean.end
    monkeypatch.setattr(TakeMean, "end", lambda self, named, means: end(self, named[1:], means[1:]))
    with pytest.raises(TrainingError, match=r"first\.weight differs between replicas dp=0 and dp=1"):
        trained(even_sgd(), "dp=2,exchange=local_sgd,local_steps=2")


@pytest.mark.long
def test_a_share_counted_by_its_weight_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dividing by the weight of all replicas instead of the replica's own makes local steps too small."""
    from meshloom.replica.loss_sums import LossSums

    divisor = LossSums.divisor
    monkeypatch.setattr(LossSums, "divisor", lambda self, batch: divisor(self, batch) * 0 + 1)
    with pytest.raises(AssertionError):
        test_local_sgd_is_the_plain_loop(make_job("mlp", "sgd", batch_size=13, steps=5, clip_grad_norm=None))
