"""One copy of the parameters for all replicas computes what one device computes, and nobody but the optimizer
may change it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.errors import CheckpointError, TrainingError
from meshloom.core.job import Job
from meshloom.exchange.buckets.buckets import spread
from meshloom.exchange.copies import OneEach
from meshloom.exchange.shared import OneForAll
from meshloom.optimizer.updater import Updater
from meshloom.optimizer.user_optimizer import make_optimizers
from meshloom.replica.exchanges.sharing import why_separate
from meshloom.telemetry.progress import Listener
from meshloom.train.trainer import Trainer
from tests.covering import slow
from tests.jobs import MLP, make_job

pytestmark = (
    pytest.mark.on_cpu
)  # processes share the host's memory; ranks on GPUs have parameters of their own
QUIET = Listener(started=lambda text: None)


def open_trainer(job: Job, plan: str = "dp=3,bucket_bytes=300", **settings: Any) -> Trainer:
    return Trainer(job, plan, devices="simulated", **{"listener": QUIET, "share": True, **settings})


@pytest.mark.long
def test_bfloat16_parameters() -> None:
    """Their sums are in rank order, as those of a copy each: the same bits."""
    job = replace(
        make_job("mlp", "adamw"),
        model=lambda: MLP().bfloat16(),
        loss=lambda model, batch: model(batch["x"].bfloat16()).square().mean(),
    )
    results: list[dict[str, Tensor]] = []
    for share in (True, False):
        with open_trainer(job, "dp=3,zero=1,bucket_bytes=300", share=share) as trainer:
            for batch in trainer.batches():
                trainer.step(batch)
            results.append(
                {name: each.clone() for name, each in trainer.replicas[2].model.state_dict().items()}
            )
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[1])


@pytest.mark.long
def test_all_replicas_point_to_the_same_memory() -> None:
    """Trainable and frozen parameters; buffers stay each replica's own."""
    with open_trainer(make_job("unused_twice", "adamw")) as trainer:
        models = [replica.model for replica in trainer.replicas]
        for first, *others in zip(
            *(dict(model.named_parameters()).values() for model in models), strict=True
        ):
            assert {each.data_ptr() for each in others} == {first.data_ptr()}
            assert first.data_ptr() % first.element_size() == 0
    with open_trainer(make_job("cnn", "adamw")) as trainer:
        assert len({replica.model.norm.running_mean.data_ptr() for replica in trainer.replicas}) == 3


@pytest.mark.long
def test_optimizer_state_is_there_once() -> None:
    def elements(share: bool) -> int:
        with open_trainer(make_job("mlp", "adamw"), share=share) as trainer:
            trainer.step(next(batches := trainer.batches()))
            batches.close()
            states = [
                state
                for replica in trainer.replicas
                for each in replica.updater._optimizers
                for state in each.state.values()
            ]
            return sum(state["exp_avg"].numel() for state in states)

    parameters = sum(each.numel() for each in MLP().parameters())
    assert (elements(True), elements(False)) == (parameters, 3 * parameters)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.long
def test_bytes_are_those_of_the_formula(optimizer: str) -> None:
    with open_trainer(make_job("gpt", optimizer, steps=4, clip_grad_norm=1.0)) as trainer:
        summary = trainer.fit()
    assert summary.counted.bytes == summary.predicted.bytes
    assert "reduce_scatter" in summary.counted.bytes["dp"]


@pytest.mark.long
def test_a_loop_of_ones_own_has_parameters_of_its_own() -> None:
    """Unless it asks for one copy: then a change in place, which every replica would make, is an error."""

    def losses(share: bool) -> list[float]:
        with open_trainer(make_job("mlp", "sgd"), share=share) as trainer:
            values: list[float] = []
            for batch in trainer.batches():
                values.append(trainer.step(batch))
                with torch.no_grad():
                    for replica in trainer.replicas:
                        replica.model.head.weight.mul_(0.5)
            return values

    assert len(losses(share=False)) == 3
    with pytest.raises(TrainingError, match=r"head\.weight was changed outside the optimizer"):
        losses(share=True)


class Writes(MLP):
    """Changes its first weight in every training forward."""

    change: Callable[[Tensor], Any]

    def forward(self, x: Tensor) -> Tensor:
        type(self).change(self.first.weight)
        return super().forward(x)


def _scale(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(0.9)


def writing_job(change: Callable[[Tensor], Any]) -> Job:
    class Model(Writes):
        pass

    Model.change = staticmethod(change)
    return replace(make_job("mlp", "sgd"), model=Model)


@pytest.mark.parametrize(
    "change",
    [_scale, slow(lambda weight: weight.data.clamp_(-0.1, 0.1)), slow(lambda weight: weight.data.neg_())],
    ids=["no_grad", "clamp", "sign"],
)
@pytest.mark.long
def test_replicas_get_copies_of_their_own_where_a_forward_writes(change: Callable[[Tensor], Any]) -> None:
    """In the first step, before any update, so that the run begins anew; a line says so, and a loop of one's own is told to ask for them."""
    losses: dict[bool, list[float]] = {True: [], False: []}
    said: list[str] = []
    for share, found in losses.items():
        listener = Listener(note=said.append, step=lambda at, found=found: found.append(at.loss))
        with open_trainer(writing_job(change), share=share, listener=listener) as trainer:
            trainer.fit()
            weights = [each.model.first.weight for each in trainer.replicas]
            assert len({each.data_ptr() for each in weights}) == len(weights)
            assert all(torch.equal(each, weights[0]) for each in weights)
    assert losses[True] == losses[False] and len(losses[True]) == 3
    assert any(each.startswith("Forwards write parameters, so every replica gets") for each in said)
    with (
        open_trainer(writing_job(change)) as trainer,
        pytest.raises(TrainingError, match=r"first\.weight was changed"),
    ):
        trainer.step(next(trainer.batches()))


@pytest.mark.long
def test_a_forward_that_writes_a_parameter_later_is_an_error() -> None:
    class Model(Writes):
        forwards = 0

        def forward(self, x: Tensor) -> Tensor:
            self.forwards += 1
            return super().forward(x) if self.forwards > 1 else MLP.forward(self, x)

    Model.change = staticmethod(_scale)
    with (
        open_trainer(replace(make_job("mlp", "sgd"), model=Model)) as trainer,
        pytest.raises(TrainingError, match=r"first\.weight was changed .* Gloo"),
    ):
        trainer.fit()


@pytest.mark.long
def test_what_needs_whole_parameters_gets_a_copy_each() -> None:
    class Norm(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            total = sum(
                each.grad.norm()
                for group in self.param_groups
                for each in group["params"]
                if each.grad is not None
            )
            for group in self.param_groups:
                for each in group["params"]:
                    each.data.sub_(0.1 * each.grad / total) if each.grad is not None else None

    def hooked(named: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(named, lr=0.1)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    def channels_last() -> nn.Module:
        return nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    sgd = make_job("mlp", "sgd")
    for job, sentence in [
        (
            replace(sgd, optimizer=lambda named: Norm(named, lr=0.1)),
            "Norm is not one whose rule is known, so it gets all parameters",
        ),
        (
            replace(sgd, optimizer=hooked),
            "SGD with step hooks is not one whose rule is known, so it gets all parameters",
        ),
        (
            replace(sgd, optimizer=hooked, elementwise=True),
            "SGD has step hooks, which may look at whole parameters",
        ),
        (replace(sgd, model=channels_last), "weight is not contiguous in memory"),
        (sgd, ""),
    ]:
        named = list(job.model().named_parameters())
        assert why_separate(make_optimizers(job, named), named) == sentence
    with open_trainer(replace(sgd, optimizer=hooked)) as trainer:
        assert trainer.replicas[0].exchange.ownership.memory != "shared"
        trainer.fit()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [((True, "dp=3,bucket_bytes=300"), (False, "dp=1")), ((False, "dp=2,zero=1"), (True, "dp=4"))],
)
@pytest.mark.slow
def test_checkpoints_go_from_one_copy_to_any_plan_and_back(
    optimizer: str, saved: Any, resumed: Any, tmp_path: Path
) -> None:
    job = make_job("gpt", optimizer, steps=4)
    job = replace(job, model=_without_dropout(job.model))  # or every plan has draws of its own
    results = []
    for first, second in ((saved, resumed), ((False, "dp=1"), (False, "dp=1"))):
        directory = tmp_path / str(len(results))
        with open_trainer(
            job, first[1], share=first[0], steps=2, out=directory, dtype=torch.float64
        ) as trainer:
            assert (trainer.replicas[0].exchange.ownership.memory == "shared") == first[0]
            trainer.fit()
        with open_trainer(job, second[1], share=second[0], resume=directory, dtype=torch.float64) as trainer:
            assert (trainer.replicas[0].exchange.ownership.memory == "shared") == second[0]
            trainer.fit()
            results.append(
                {name: each.clone() for name, each in trainer.replicas[0].model.state_dict().items()}
            )
    for name, each in results[1].items():
        # sum order differs
        torch.testing.assert_close(
            results[0][name], each, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


def _without_dropout(model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        built = model()
        for module in built.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return built

    return build


@pytest.mark.long
def test_a_step_that_broke_off_in_its_update_is_not_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    update = Updater.update

    def breaks(self: Updater, gradients: Any, loss: float, **settings: Any) -> Any:
        if trainer.next_step == 1 and self is trainer.replicas[1].updater:
            raise KeyboardInterrupt
        return update(self, gradients, loss, **settings)

    monkeypatch.setattr(Updater, "update", breaks)
    with open_trainer(make_job("mlp", "adamw"), out=tmp_path) as trainer:
        with pytest.raises(KeyboardInterrupt):
            trainer.fit()
        with pytest.raises(CheckpointError, match="failed in the middle"):
            trainer.save()
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.long
def test_copies_are_one_or_one_each() -> None:
    """What tells the two apart is asked of the exchange."""
    for share, kind in ((True, OneForAll), (False, OneEach)):
        with open_trainer(make_job("mlp", "adamw"), "dp=2,zero=1", share=share) as trainer:
            exchange: Any = trainer.replicas[0].exchange
            assert isinstance(exchange._copies, kind) and (exchange.ownership.memory == "shared") == share


def test_even_shares_of_a_bucket_are_of_about_as_many_parameters():
    sizes = [1, 64, 64, 3] * 12 + [4096] * 24 + [64] * 48
    named = [(str(number), nn.Parameter(torch.zeros(size))) for number, size in enumerate(sizes)]
    ordered = spread(named)
    assert sorted(ordered, key=lambda each: int(each[0])) == named
    for num_ranks in (2, 3, 4):
        counts, at, share = [0] * num_ranks, 0, sum(sizes) / num_ranks
        for _, each in ordered:
            for rank in range(num_ranks):
                counts[rank] += at < (rank + 1) * share and at + each.numel() > rank * share
            at += each.numel()
        assert (
            max(counts) - min(counts) <= 5
        )  # one mean size ahead or behind at each end: 4096 / 862 small ones
