"""Whether a job takes the script's own steps: its losses and its parameters, on one device."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.adopt.data.zipped_loader import ZippedSamples
from meshloom.adopt.proving.evaluated import ComparedMetric, ExpectedMetrics, compared_metrics
from meshloom.adopt.watching.draws import set_draws, tensors_of
from meshloom.adopt.watching.watch import Watched
from meshloom.core.job import Job
from meshloom.core.jobfile import as_program, load_job
from meshloom.core.moments.by_metric import without_evaluation
from meshloom.core.moments.current_step import step as current_step
from meshloom.core.plan import Plan
from meshloom.train.trainer import Trainer

ROUNDING = (
    1e-5  # of a parameter's largest value, and of a loss, in float32; sums in another order, some steps
)


@dataclass(frozen=True)
class Proof:
    """losses: of each step, the script's and the job's. parameters: their number. largest: the largest difference of an
    element, over the largest change of its parameter's elements. initial: whether the job's own initial parameters are the
    script's. samples: whether the job's dataset gives the samples that the script's gave; None: not compared.
    metrics: of the script's evaluation after `evaluated_after` steps. average: the largest difference of an element of the
    average, over the largest change of its parameter's elements. problem: why there is no comparison."""

    losses: list[tuple[float, float]]
    parameters: int
    largest: float
    bits: bool
    initial: bool
    samples: bool | None
    problem: str = ""
    metrics: Sequence[ComparedMetric] = ()
    evaluated_after: int = 0
    average: float | None = None

    @property
    def holds(self) -> bool:
        """Whether losses and parameters are equal up to rounding."""
        close = all(abs(job - script) <= ROUNDING * max(1.0, abs(script)) for script, job in self.losses)
        return not self.problem and close and self.largest <= 1e-3 and self.samples is not False

    def told(self) -> str:
        """In lines of text."""
        if self.problem:
            return f"NOT PROVED: {self.problem}"
        lines = ["  step        script           job"]
        lines += [
            f"  {index:4d}  {script:12.8f}  {job:12.8f}" for index, (script, job) in enumerate(self.losses)
        ]
        equal = (
            "bit for bit"
            if self.bits
            else f"up to rounding (at most {self.largest:.1e} of what training changed)"
        )
        if self.holds:
            lines.append(
                f"PROVED: {len(self.losses)} losses and {self.parameters} parameters and buffers equal the script's, {equal}."
            )
        else:
            lines.append(
                f"NOT PROVED: losses or parameters differ (at most {self.largest:.1e} of what training changed)."
            )
        if self.metrics:
            lines.append(f"Evaluation after step {self.evaluated_after}, of the script's parameters then:")
            lines.append("                              script           job")
            for each in self.metrics:
                lines.append(f"  {each.name:22s}  {each.script:12.8f}  {each.own:12.8f}")
                if abs(each.own - each.reported) > ROUNDING * max(1.0, abs(each.own)):
                    lines.append(f"  (the script has the mean over batches; a job's, over samples, is {each.reported:.8f})")  # fmt: skip
        if self.average is not None:
            lines.append(f"The average of the parameters equals the script's up to rounding (at most {self.average:.1e} of what training changed).")  # fmt: skip
        if not self.initial:
            lines.append(
                "The job's own initial parameters are other draws than the script's, which were used in this comparison."
            )
        if self.samples is False:
            lines.append("The job's dataset gave other samples than the script's.")
        return "\n".join(lines)


def prove(
    target: Path, words: tuple[str, ...], watched: Watched, expected: ExpectedMetrics | None = None
) -> Proof:
    """Train the job in the file for the steps that were watched, on the same batches, with the same draws; then evaluate with
    the parameters that the script evaluated. expected: of that evaluation."""
    try:
        with as_program(str(target), words):
            job = load_job(str(target))
        assert job is not None
        proof = _compared(job, watched)
        if expected is None or job.evaluate is None:
            return proof
        with as_program(str(target), words):
            metrics = compared_metrics(job, expected)
        return replace(proof, metrics=metrics, evaluated_after=expected.seen.steps)
    except Exception as error:
        return Proof(
            [],
            0,
            0.0,
            False,
            True,
            None,
            f"the job failed with {type(error).__name__}: {' '.join(str(error).split())}",
        )


def _compared(job: Job, watched: Watched) -> Proof:
    found: dict[str, bool] = {}
    micro = len(watched.steps[0])
    samples = [
        one for each in watched.steps for batch in each for one in _samples(batch.samples, batch.batch)
    ]
    checked = _dataset_gives(job, watched)
    rows = len(samples) // len(watched.steps)
    comparison = replace(
        without_evaluation(job), model=_model_of(job.model, watched, found), loss=_loss_of(job.loss, watched), data=lambda: samples, batch_size=rows,
        steps=len(watched.steps), shuffle=False, drop_last=False, num_workers=0,
    )  # fmt: skip
    plan = Plan.parse("dp=1" if micro == 1 else f"dp=1,microbatches={micro}")
    with Trainer(comparison, plan, devices="simulated", cache="off") as trainer:
        losses: list[float] = []
        averages: list[dict[str, Tensor]] = []
        parameters: list[dict[str, Tensor]] = []
        for batch in trainer.batches():
            losses.append(trainer.step(batch))
            if job.average is not None:
                averages.append(_averages(trainer))
                parameters.append(_parameters(trainer))
        values = {
            name: each.detach().clone() for name, each in trainer.replicas[0].model.state_dict().items()
        }
    script = [sum(batch.loss for batch in each) for each in watched.steps]
    largest, bits = _difference(watched, values)
    return Proof(
        list(zip(script, losses, strict=True)), len(watched.after), largest, bits and losses == script, found["initial"], checked,
        average=_difference_of_average(watched, averages, parameters) if averages else None,
    )  # fmt: skip


def _averages(trainer: Trainer) -> dict[str, Tensor]:
    """Of one rank that has all parameters, by name."""
    averages = trainer.replicas[0].updater.state.averages
    assert averages is not None
    found = {name: each.flatten() for name, each in _parameters(trainer).items()}
    for each in averages.held:
        found[each.name][each.start : each.stop] = each.tensor.detach().flatten()
    return found


def _parameters(trainer: Trainer) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in trainer.replicas[0].model.named_parameters()}


def _difference_of_average(
    watched: Watched, averages: Sequence[dict[str, Tensor]], parameters: Sequence[dict[str, Tensor]]
) -> float:
    """As `Proof.average`. An average that begins with the initial parameters differs from one that begins with those after the
    first step by decay ** steps of the first update."""
    seen = watched.average
    assert seen is not None
    largest = 0.0
    for name, value in seen.values.items():
        own = averages[seen.steps - 1][name].view_as(value).double()
        first, before = parameters[0][name].double(), watched.before[name].double()
        if seen.from_initial:
            own = own + seen.decay**seen.steps * (before - first)
        change = (parameters[seen.steps - 1][name].double() - before).abs().max().item()
        scale = max(change, 1e-3 * value.double().abs().max().item(), 1e-12)
        largest = max(largest, (own - value.double()).abs().max().item() / scale)
    return largest


def _samples(samples: list[Any] | None, batch: Any) -> list[Any]:
    if samples is not None:
        return samples
    return list(zip(*batch, strict=True))


def _model_of(
    make: Callable[[], nn.Module], watched: Watched, found: dict[str, bool]
) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        made = make()
        own = made.state_dict()
        found["initial"] = all(
            torch.equal(own[name], each) for name, each in watched.before.items() if name in own
        )
        made.load_state_dict(watched.before)
        return made

    return model


def _loss_of(loss: Callable[[Any, Any], Any], watched: Watched) -> Callable[[Any, Any], Any]:
    """The job's loss, which draws what the script drew for the same batch."""
    calls: dict[int, int] = {}

    def drawn(model: Any, batch: Any) -> Any:
        step = current_step()
        micro = calls[step] = calls.get(step, -1) + 1
        if step < len(watched.steps) and micro < len(watched.steps[step]):
            set_draws(watched.steps[step][micro].draws)
        return loss(model, batch)

    return drawn


def _dataset_gives(job: Job, watched: Watched) -> bool | None:
    """Whether each sample of the first batch is in the job's dataset; None for streams and random transforms."""
    first = watched.steps[0][0].samples
    if first is None:
        return None
    dataset = job.data()
    taken = [(dataset, first)]
    if isinstance(dataset, ZippedSamples):
        taken = [
            (own, [each for one in first for each in one[place]])
            for place, own in enumerate(dataset.datasets)
        ]
    if not all(hasattr(own, "__len__") and len(own) <= 100_000 and _repeats(own) for own, _ in taken):
        return None
    return all(_holds(own, samples) for own, samples in taken)


def _holds(dataset: Any, samples: Sequence[Any]) -> bool:
    own = {_bits(dataset[index]) for index in range(len(dataset))}
    return all(_bits(each) in own for each in samples)


def _repeats(dataset: Any) -> bool:
    torch.manual_seed(1)
    random.seed(1)
    first = _bits(dataset[0])
    torch.manual_seed(2)
    random.seed(2)
    return first == _bits(dataset[0])


def _bits(sample: Any) -> bytes:
    found = tensors_of(sample)
    if found:
        return b"".join(each.detach().contiguous().cpu().numpy().tobytes() for each in found)
    return repr(sample).encode()


def _difference(watched: Watched, values: dict[str, Tensor]) -> tuple[float, bool]:
    """The largest difference of an element, over the largest change of its parameter; and whether there is none."""
    largest, bits = 0.0, True
    for name, after in watched.after.items():
        own = values.get(name)
        if own is None or own.shape != after.shape:
            return float("inf"), False
        if torch.equal(own, after):
            continue
        bits = False
        kept = ~watched.noise[name] if name in watched.noise else slice(None)
        if not after[kept].numel():
            continue
        change = (after.double() - watched.before[name].double()).abs().max().item()
        scale = max(change, 1e-3 * after.double().abs().max().item(), 1e-12)
        largest = max(largest, (own[kept].double() - after[kept].double()).abs().max().item() / scale)
    return largest, bits
