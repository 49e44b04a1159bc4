"""What ranks must have alike is compared: learning rates in every step within sums that travel anyway, other settings of optimizers'
groups at the start and every 100 steps, the length and three samples of the data at the start."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset

from meshloom.core.errors import JobError
from meshloom.core.job import Evaluate, Job
from meshloom.data.samples import some_samples
from meshloom.replica.loss_sums import LossSums, Told
from meshloom.replica.replica import Replica
from meshloom.telemetry.progress import Listener
from meshloom.train.trainer import Trainer
from tests.covering import slow
from tests.jobs import Samples, class_loss, make_job, vectors

PLANS = [
    "dp=2",
    "dp=3,microbatches=2",
    "tp=3",
    "pp=2",
    "dp=2,tp=2",
    "dp=2,zero=3",
    "dp=2,exchange=local_sgd,local_steps=3",
]


# --- Rates.


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 8, 1000, 1024, 4096])
def test_what_ranks_tell_adds_up_exactly(num_ranks: int):
    """The sum of a rate over 3 ranks is not 3 times the rate; that of digests is, in a float64, in any order."""
    chance = random.Random(num_ranks)
    for asking in {0, 1, num_ranks}:
        rates = [chance.random() for _ in range(3)]
        told = [Told(num_ranks, asks=rank < asking, rates=rates) for rank in range(num_ranks)]
        chance.shuffle(told)
        total = float(torch.tensor([each.value for each in told], dtype=torch.float64).sum())
        assert int(total) == sum(each.value for each in told)
        assert {each.answered(total) for each in told} == {(asking > 0, False)}
        if num_ranks > 1:
            other = Told(num_ranks, asks=asking > 0, rates=[*rates[:2], rates[2] * (1 + 2**-52)])
            total += other.value - Told(num_ranks, asks=asking > 0, rates=rates).value
            assert {each.answered(total) for each in (told[0], other)} == {(asking > 0, True)}


def test_every_rank_sees_that_rates_are_unlike():
    """Also the one whose rate is the mean of all."""
    told = [Told(3, rates=[rate]) for rate in (0.1, 0.2, 0.3)]
    total = float(sum(each.value for each in told))
    assert [each.answered(total) for each in told] == [(False, True)] * 3


def with_own_rates(step: int, **settings: Any) -> Job:
    """Ranks' rates of the second group are alike until before `step`."""
    numbers = count()

    def scheduler(optimizer: torch.optim.Optimizer) -> LambdaLR:
        number = next(numbers)

        def own_rate(now: int) -> float:
            return 0.5 if now < step else 0.5 + number / 8

        return LambdaLR(optimizer, [lambda now: 0.5, own_rate])

    def optimizer(named: Any) -> torch.optim.Optimizer:
        parameters = [each for _, each in named]
        return torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.25}], lr=0.1)

    return replace(make_job("mlp", "sgd"), optimizer=optimizer, scheduler=scheduler, **settings)


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.long
def test_rates_that_differ_between_ranks_stop_the_run_before_the_update(
    plan: str, saves: bool, tmp_path: Path
):
    with Trainer(
        with_own_rates(2), plan, devices="simulated", out=tmp_path / "run" if saves else None, cache="off"
    ) as trainer:
        batches = trainer.batches()
        for _ in range(2):
            trainer.step(next(batches))
        before = [[each.detach().clone() for each in updated_by(replica)] for replica in trainer.replicas]
        with pytest.raises(JobError) as raised:
            trainer.step(next(batches))
        text = str(raised.value)
        assert re.match(
            r"In step 2 the learning rate of group 1 of SGD is (\S+) on rank 0 \(dp=0\) and (?!\1)\S+ on rank 1 \(",
            text,
        )
        for replica, values in zip(trainer.replicas, before, strict=True):
            assert values and all(map(torch.equal, updated_by(replica), values))


def updated_by(replica: Replica) -> list[Tensor]:
    """What a rank's optimizers update."""
    groups = [group for each in replica.updater.state.optimizers for group in each.param_groups]
    return [each for group in groups for each in group["params"]]


def test_a_rate_that_differs_from_the_start_is_seen_before_the_first_step():
    with pytest.raises(
        JobError,
        match=r"At the start the learning rate of group 1 of SGD is (0\.125|0\.15625) on rank 0 .* and (?!\1)0\.\d+ on rank 1",
    ):
        Trainer(with_own_rates(0), "dp=2", devices="simulated")


@pytest.mark.parametrize("plan", [each for each in PLANS if each != "dp=2,tp=2"])
@pytest.mark.covering("dp=2", "dp=3,microbatches=2", "tp=3", "local_sgd")
@pytest.mark.long
def test_comparing_rates_adds_no_exchange_but_one_of_8_bytes_along_tp(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    job = replace(make_job("mlp", "adamw"), steps=3)

    def sent(out: Path | None) -> dict[str, tuple[int, int]]:
        """Calls and bytes of all-reduces, by axis."""
        with Trainer(job, plan, devices="simulated", out=out, cache="off") as trainer:
            summary, context = trainer.fit(), trainer.replicas[0].context
            assert summary.predicted == summary.counted
            groups = {**context.groups, "statistics": context.statistics}
            counts = {
                axis: group.counts["all_reduce"]
                for axis, group in groups.items()
                if "all_reduce" in group.counts
            }
            return {axis: (each.calls, each.bytes) for axis, each in counts.items()}

    compared = sent(None)
    if "local_sgd" not in plan:  # which averages what it saves
        assert (
            sent(tmp_path / "run") == compared
        )  # whether a rank asks for something is said in the same 8 bytes
    monkeypatch.setattr(
        LossSums, "rates", property(lambda self: None, lambda self, rates: None), raising=False
    )
    without = sent(None)
    calls, num_bytes = without.get("tp", (0, 0))
    assert compared == {**without, **({"tp": (calls + 3, num_bytes + 3 * 8)} if "tp" in plan else {})}


# --- Other settings.


def with_own_settings(name: str, value: Callable[[int], Any], step: int = 0) -> Job:
    """Each rank's second group has its own value from `step` on."""
    numbers = count()

    def optimizer(named: Any) -> torch.optim.Optimizer:
        parameters, number = [each for _, each in named], next(numbers)
        own = {name: value(number)} if not step else {}
        made = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:], **own}], lr=0.01)
        changed = count()

        def change(*_: Any) -> None:
            if step and next(changed) == step:
                made.param_groups[1][name] = value(number)

        made.register_step_pre_hook(change)
        return made

    return replace(make_job("mlp", "sgd"), optimizer=optimizer, elementwise=True)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,zero=2"])
@pytest.mark.long
def test_settings_that_differ_between_ranks_are_refused_at_the_start(plan: str):
    job = with_own_settings("weight_decay", lambda number: 0.1 * (1 + number))
    with pytest.raises(
        JobError,
        match=r"At the start weight_decay of group 1 of AdamW is (0\.[12]) on rank 0 \(dp=0\) and (?!\1)0\.[12] on rank 1",
    ):
        Trainer(job, plan, devices="simulated", cache="off")


def test_settings_that_come_to_differ_are_seen_every_100_steps():
    job = replace(with_own_settings("betas", lambda number: (0.9, 0.99 - number / 100), step=50), steps=120)
    with Trainer(job, "dp=2", devices="simulated") as trainer:
        with pytest.raises(JobError, match="After step 99 betas of group 1 of AdamW"):
            trainer.fit()
        assert trainer.next_step == 100


@pytest.mark.long
def test_a_group_of_which_a_rank_updates_nothing_is_not_compared():
    """Optimizers count the steps of a group where it has parameters."""
    job = with_own_settings("weight_decay", lambda number: 0.1)

    def optimizer(named: Any) -> torch.optim.Optimizer:
        made = job.optimizer(named)
        assert isinstance(made, torch.optim.Optimizer)

        def counted(*_: Any) -> None:
            for group in made.param_groups:
                if group["params"]:
                    group["eps"] = group["eps"] * 1.01

        made.register_step_pre_hook(counted)
        return made

    whole = replace(job, optimizer=optimizer, steps=100)
    with Trainer(whole, "pp=2", devices="simulated", cache="off") as trainer:
        assert not all(
            group["params"]
            for replica in trainer.replicas
            for group in replica.updater.state.optimizers[0].param_groups
        )
        trainer.fit()


# --- Data.


class Stream(IterableDataset[dict[str, Tensor]]):
    def __init__(self, samples: Samples, start: int = 0, stop: int | None = None) -> None:
        self.samples, self.rows = samples, range(start, len(samples) if stop is None else stop)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.samples[each] for each in self.rows)


def changed(index: int) -> Samples:
    samples = vectors()
    samples.fields["x"][index] += 1
    return samples


class Built:
    """A data function: builds the first of these until `begin` is called, then one after another, each for as many builds as it says."""

    def __init__(self, *builds: tuple[int, Callable[[], Any]]) -> None:
        self.builds, self.calls, self.has_begun = (
            [build for times, build in builds for _ in range(times)],
            count(),
            False,
        )

    def __call__(self) -> Any:
        number = next(self.calls) if self.has_begun else 0
        return self.builds[min(number, len(self.builds) - 1)]()


def start(job: Job, plan: str, data: Built) -> list[str]:
    """Begins to read; what was noted."""
    notes: list[str] = []
    listener = Listener(note=notes.append)
    with Trainer(job, plan, devices="simulated", listener=listener, cache="off") as trainer:
        notes.clear()
        data.has_begun = True
        next(trainer.batches())
    return notes


whole_stream = partial(Stream, vectors())
OTHER = {
    "another length": (((1, vectors), (1, partial(vectors, 29))), "30 samples on rank 0 .* and 29 samples on rank"),
    "another sample": (((1, vectors), (1, partial(changed, 15))), "one sample 15 on rank 0 .* and another one on rank"),
    "another last sample": (((1, vectors), (1, partial(changed, 29))), "one sample 29 on rank 0"),
    "another kind": (((1, vectors), (2, whole_stream)), "30 samples on rank 0 .* and a stream on rank"),
    "another stream": (((2, whole_stream), (2, partial(whole_stream, 1))), "one sample 0 of epoch 0 on rank 0"),
    "an empty stream": (((2, whole_stream), (2, partial(whole_stream, 0, 0))), "3 samples at first on rank 0 .* and 0 on rank"),
}  # fmt: skip


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,pp=2", "tp=2"])
@pytest.mark.parametrize("what", OTHER)
@pytest.mark.long
def test_data_that_differs_between_ranks_is_refused(what: str, plan: str):
    """Also beside a single rank that reads: there may be one that is told another number."""
    builds, sentence = OTHER[what]
    data = Built(*builds)
    with pytest.raises(JobError, match=f"Job.data=.... gives {sentence}"):
        start(make_job("mlp", "sgd", data=data), plan, data)


def test_data_to_evaluate_is_compared_too():
    data = Built((1, vectors), (1, partial(changed, 15)))
    job = make_job("mlp", "sgd", evaluate=Evaluate(data=data, metrics={"loss": class_loss}, every=3))
    with pytest.raises(JobError, match="Evaluate.data=.... gives one sample 15 on rank 0"):
        start(job, "dp=2", data)


class Noisy(Samples):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = int.from_bytes(os.urandom(6), "little") if index == 15 else 0
        return {**super().__getitem__(index), "id": torch.tensor(noise)}


def test_a_sample_that_differs_from_itself_is_not_compared_and_a_line_says_so():
    data = Built((9, lambda: Noisy(**vectors().fields)))
    (note,) = start(make_job("mlp", "sgd", data=data), "dp=2", data)
    assert note.startswith(
        "Job(data=...): sample 15 differs from itself when it is read twice, so it was not compared between ranks"
    )


class Drawn(Samples):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == 29:
            raise ValueError("a sample that this run does not reach")
        return {**super().__getitem__(index), "noise": torch.randn(3)}


def test_draws_are_those_of_the_sample_and_what_cannot_be_read_is_left_to_training():
    data = Built((9, lambda: Drawn(**vectors().fields)))
    job = make_job("mlp", "sgd", data=data, drop_last=True, shuffle=False)
    assert start(job, "dp=2", data) == []
    state = torch.get_rng_state()
    found = some_samples(data, job, "", lambda sample: str(sample["noise"]))
    assert torch.equal(torch.get_rng_state(), state)
    assert found and list(found.samples) == ["0", "15"] and not found.is_whole
    assert all(made == again for made, again in found.samples.values())


class Opened:
    """A sample that holds what has no text."""

    def __init__(self) -> None:
        self.by = (each for each in ())


def test_what_cannot_be_compared_is_said():
    data = Built((9, lambda: [Opened()] * 30))
    job = make_job(
        "mlp",
        "sgd",
        data=data,
        collate=lambda samples: {
            "x": torch.ones(len(samples), 7),
            "y": torch.ones(len(samples), dtype=torch.int64),
        },
    )
    (note,) = start(job, "dp=2", data)
    assert (
        note
        == "Job(data=...): samples were not compared between ranks: a sample['by'], a generator cannot be."
    )


class Counting(Samples):
    """What a script's schedule may close over: the newest dataset, and how many of its samples were read."""

    newest: Counting

    def __init__(self) -> None:
        super().__init__(**vectors().fields)
        self.read = 0
        Counting.newest = self

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(("plan", "read"), [("dp=1", 12), ("dp=2", 6), ("dp=3", 4)])
def test_the_compared_data_is_not_the_data_that_trains(plan: str, read: int):
    with Trainer(make_job("mlp", "sgd", data=Counting), plan, devices="simulated") as trainer:
        batches = trainer.batches()
        next(batches)
        assert Counting.newest.read == read


def test_an_iterator_that_can_be_read_once_keeps_its_samples():
    samples = iter([vectors()[each] for each in range(24)])
    with Trainer(make_job("mlp", "sgd", data=lambda: samples), "dp=2", devices="simulated") as trainer:
        first = next(trainer.batches())
    assert torch.equal(first.shares[0][0].data["x"], vectors().fields["x"][:6])


# --- On processes.


@pytest.mark.processes
@pytest.mark.parametrize(
    ("plan", "name"), [("tp=2", "split"), slow("dp=2", "by_environment"), slow("pp=2", "rates")]
)
def test_a_job_that_goes_by_its_rank_is_refused_or_finds_none(plan: str, name: str, tmp_path: Path):
    out = tmp_path / "read"
    found = subprocess.run(
        [sys.executable, "-m", "meshloom", "train", f"tests/rank_reading_job.py:{name}", "--plan", plan, "--devices", "cpu"],
        capture_output=True, text=True, timeout=120, env={**os.environ, "MESHLOOM_TESTS_READ": str(out)},
    )  # fmt: skip
    if name == "by_environment":
        assert found.returncode == 0, found.stderr
        assert sorted(set(map(int, out.read_text().split()))) == list(range(24))
        return
    assert found.returncode == 2
    assert (
        "learning rate of group 0" if name == "rates" else "Job(data=...) gives one sample 0"
    ) in found.stderr
