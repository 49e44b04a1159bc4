"""Every module trains in the mode in which the job built it, in every step, under every plan and on one
device alike.

Found from outside: tp and pp trained a model that was handed over in evaluation mode, as `from_pretrained`
returns it, without its dropout (losses under dp=1 2.2317, 1.2442, 3.9931, under tp=2 and pp=2 2.1116, 1.5055,
1.5208); and the first evaluation made batch norm that a job had frozen train.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured import check_against_eager
from torch import Tensor, nn

from meshloom.core.errors import TrainingError
from meshloom.core.job import Evaluate, Job
from meshloom.core.moments.modes import Modes, as_trained
from meshloom.core.random import KeyedDraws, chunk_seed, model_seed, seed_everything
from meshloom.program.capture.capture import capture
from meshloom.program.trace.precision import build_model
from meshloom.telemetry.progress import Listener
from meshloom.train.trainer import Trainer
from tests.fitted import fitted
from tests.jobs import class_loss, vectors

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


def handed_over_in_evaluation_mode() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 24), nn.Dropout(0.9), nn.Linear(24, 5)).eval()


def with_a_new_head() -> nn.Module:
    """As fine-tuning begins: what `from_pretrained` returned is in evaluation mode, and the new part of it is
    not."""
    model = nn.Sequential(nn.Linear(7, 24), nn.Dropout(0.9), nn.Identity()).eval()
    model[2] = nn.Linear(24, 5)
    return model


def with_frozen_statistics() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(7, 24), nn.BatchNorm1d(24), nn.Dropout(0.5), nn.Dropout(0.5), nn.Linear(24, 5)
    )
    nn.init.normal_(model[1].running_mean)
    model[1].eval()
    model[2].eval()
    return model


class _KeepsItsNorm(nn.Sequential):
    """Frozen in the other usual way: the module's own `train`."""

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self[1].eval()
        return self


def with_a_train_of_its_own() -> nn.Module:
    model = _KeepsItsNorm(nn.Linear(7, 24), nn.BatchNorm1d(24), nn.Dropout(0.5), nn.Linear(24, 5))
    nn.init.normal_(model[1].running_mean)
    return model.eval()


MODELS: dict[Callable[[], nn.Module], set[str]] = {  # what stays in evaluation mode
    handed_over_in_evaluation_mode: set(),
    with_a_new_head: set(),
    with_frozen_statistics: {"1", "2"},
    with_a_train_of_its_own: {"1"},
}


def job_of(model: Callable[[], nn.Module], **settings: Any) -> Job:
    optimizer = lambda named: torch.optim.SGD([p for _, p in named], lr=0.3)  # noqa: E731
    return Job(
        model=model,
        optimizer=optimizer,
        data=vectors,
        **{"loss": class_loss, "batch_size": 6, "steps": 4, **settings},
    )


def one_device(job: Job, steps: int) -> list[float]:
    """Losses of whole batches, as a script has them that calls `.eval()` again on what it freezes after every
    `model.train()`."""
    seed_everything(model_seed(job.seed))
    model, data, found = job.model().train(), job.data(), []
    kept = MODELS[job.model]
    optimizer: Any = job.optimizer(list(model.named_parameters()))
    for step in range(steps):
        for name in kept:
            model.get_submodule(name).eval()
        batch = {name: each[step * job.batch_size :][: job.batch_size] for name, each in data.fields.items()}
        seed_everything(chunk_seed(job.seed, step, 0))
        with KeyedDraws():
            loss: Any = job.loss(model, batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    return found


def run(job: Job, plan: str, between: Callable[[nn.Module], Any] = lambda model: None) -> list[float]:
    with Trainer(job, plan, devices="simulated") as trainer:
        found = []
        for batch in trainer.batches():
            found.append(trainer.step(batch))
            for replica in trainer.replicas:
                between(replica.model)
            if job.evaluate:
                trainer.evaluate()
    return found


@pytest.mark.parametrize("model", MODELS)
def test_a_plan_that_reads_trains_in_the_mode_of_one_device(model: Callable[[], nn.Module]):
    job = job_of(model, shuffle=False)
    expected = one_device(job, 4)
    assert run(job, "keyed_draws=true") == pytest.approx(expected, rel=1e-6)
    # sums over tp, and their rounding through four steps
    assert run(job, "tp=2,keyed_draws=true") == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "pp=2"])
@pytest.mark.slow
def test_what_is_frozen_stays_frozen_after_an_evaluation(plan: str):
    job = job_of(with_frozen_statistics)
    watched = job_of(with_frozen_statistics, evaluate=Evaluate(vectors, {"loss": class_loss}, every=1))
    assert run(watched, plan) == run(job, plan)


def test_an_asynchronous_worker_keeps_what_is_frozen():
    """One worker and one server, which nothing overtakes, are one device."""
    job = job_of(
        with_frozen_statistics, evaluate=Evaluate(vectors, {"loss": class_loss}, every=1), shuffle=False
    )
    found: list[float] = []
    fitted(
        job,
        "dp=1,exchange=async,keyed_draws=true",
        listener=Listener(step=lambda each: found.append(each.loss)),
    )
    assert found == pytest.approx(one_device(job, 4), rel=1e-6)


@pytest.mark.parametrize("plan", ["dp=1", "pp=2"])
def test_a_loop_of_ones_own_may_evaluate_between_steps(plan: str):
    """Also without going back to training mode, or with all of the model in it."""
    job = job_of(with_frozen_statistics)
    expected = run(job, plan)
    assert run(job, plan, between=lambda model: model.eval()) == expected
    assert run(job, plan, between=lambda model: model.eval().train()) == expected


@pytest.mark.parametrize("plan", ["dp=1", "tp=2"])
def test_a_part_put_into_evaluation_mode_between_steps_is_refused(plan: str):
    with pytest.raises(TrainingError, match="3 was put into evaluation mode between two steps"):
        run(job_of(with_frozen_statistics), plan, between=lambda model: model.get_submodule("3").eval())


def test_a_loss_may_set_modes_itself():
    """Of the batch norm, in every call: that is no change between steps. (Programs have one mode and refuse
    it with its line.)"""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        model.get_submodule("1").eval()
        return class_loss(model, batch)

    def model() -> nn.Module:
        built = with_frozen_statistics()
        built[1].train()
        return built

    assert run(job_of(model, loss=loss), "dp=1") == run(job_of(with_frozen_statistics), "dp=1")


def test_programs_of_both_modes_are_the_module_in_them():
    """A program for evaluation of a model whose new head was in training mode was read with that head in
    it."""

    def model() -> nn.Module:
        built = handed_over_in_evaluation_mode()
        built[1].train()
        return built

    job = job_of(model)
    batches = [{name: each[i * 6 : i * 6 + 6] for name, each in vectors().fields.items()} for i in range(2)]
    draws = []
    for training in (True, False):
        program = capture(job, (batches[0], batches[1]), training=training)
        check_against_eager(program, job, batches)
        draws.append(sum(node.num_draws for node in program.nodes))
        assert all(each.training is training for each in build_model(job, None, training=training).modules())
    assert draws == [1, 0]


def test_evaluation_that_fails_restores_modes_too():
    model = as_trained(with_frozen_statistics())
    before = [each.training for each in model.modules()]
    seen: list[bool] = []

    def evaluate() -> None:
        with Modes(model).evaluation():
            seen.extend(each.training for each in model.modules())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate()
    assert seen and not any(seen)
    assert [each.training for each in model.modules()] == before
