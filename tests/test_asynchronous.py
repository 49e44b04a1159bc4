"""Asynchronous plans train real jobs on simulated devices: against one device, against a plain loop, through
kills and resumes."""

from __future__ import annotations

import copy
import heapq
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from meshloom.asynchronous.processes import ProcessRun
from meshloom.asynchronous.protocol.circumstances import Circumstances, parse_incidents
from meshloom.asynchronous.state.checkpoints import read_state
from meshloom.asynchronous.state.division import divide_over_servers
from meshloom.asynchronous.state.push_shares import PushShares
from meshloom.asynchronous.state.settings import AsynchronousSettings
from meshloom.cli.main import main
from meshloom.core.errors import CheckpointError, DataError, JobError, MeshloomError, PlanError, TrainingError
from meshloom.core.job import Evaluate, Job
from meshloom.core.plan import Plan
from meshloom.core.random import model_seed, sample_order, seed_everything
from meshloom.launch.failure import EndedError
from meshloom.telemetry.progress import QUIET, Listener, Progress
from meshloom.train.contract import Batch, TrainingRun
from meshloom.train.trainer import Trainer
from tests.jobs import MLP, Samples, class_loss, make_job, vectors
from tests.saving_jobs import names_in

pytestmark = pytest.mark.long


class Run:
    """What a run has come to."""

    def __init__(self, job: Job, plan: str, **how: Any) -> None:
        self.notes: list[str] = []
        self.steps: list[Progress] = []
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.saved: list[int] = []
        listener = Listener(
            started=lambda text: None, note=self.notes.append, step=self.steps.append,
            evaluated=lambda step, values: self.evaluations.append((step, values)), saved=lambda step, path: self.saved.append(step),
        )  # fmt: skip
        seen = {key: how.pop(key) for key in ("step_seconds", "latency_seconds", "jitter") if key in how}
        if incidents := how.pop("incidents", ""):
            seen["incidents"] = parse_incidents(incidents)
        with Trainer(
            job,
            plan,
            devices="simulated",
            listener=listener,
            circumstances=Circumstances(**seen) if seen else None,
            **how,
        ) as trainer:
            self.summary = trainer.fit()
            model = trainer.asynchronous.model if trainer.asynchronous else trainer.replicas[0].model
            self.state: dict[str, Tensor] = copy.deepcopy(dict(model.state_dict()))
            self.ages = Counter(trainer.asynchronous.ages) if trainer.asynchronous else Counter[int]()
            self.seconds = trainer.asynchronous.cluster.seconds if trainer.asynchronous else 0.0


def same(a: Run, b: Run) -> bool:
    return a.state.keys() == b.state.keys() and all(
        torch.equal(a.state[name], b.state[name]) for name in a.state
    )


# --- Against one device.


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("cnn", "sgd"), ("gpt", "adamw"), ("unused_twice", "muon"), ("branch", "adafactor")],
)
def test_one_worker_is_one_device_bit_for_bit(model: str, optimizer: str) -> None:
    """Clipping, schedulers, dropout, batch statistics, short batches, unused parameters, and however many
    servers there are."""
    job = make_job(model, optimizer, steps=7)
    alone = Run(job, "dp=1,microbatches=2")
    for servers in (1, 3):
        assert same(Run(job, f"dp=1,microbatches=2,exchange=async,servers={servers}"), alone)


@pytest.mark.slow
def test_a_recomputing_worker_is_one_device() -> None:
    """Its loss is captured, and takes the servers' values all the same."""
    plan, job = "recompute=full,microbatches=2", make_job("cnn", "adamw", steps=4)
    assert same(Run(job, f"dp=1,{plan},exchange=async"), Run(job, f"dp=1,{plan}"))


@pytest.mark.parametrize("servers", [1, 2])
def test_what_was_lost_with_a_server_is_said_and_not_read_again(servers: int) -> None:
    """Server 0 is killed after the third update; the snapshot is that of the second, and the fourth share is
    under way."""
    job, plan = counting_job(steps=4), f"dp=1,exchange=async,servers={servers}"
    run = Run(job, plan, incidents="server:0@3.5/2", snapshot_every=2)
    shares = PushShares(job, Plan.parse(plan))
    used = Counter(index for share in (0, 1, 4, 5) for index in shares.find(share).indices)
    assert run.state["counts"].tolist() == [-used[index] for index in range(29)]
    assert len(run.steps) == 5 and int(run.state["updates"]) == 4
    [back] = [note for note in run.notes if "a server was back" in note]
    assert back.endswith(
        "at the snapshot of update 2 again; lost since then: 1 update, whose samples are not read again"
    )


# --- Against a plain loop.


def plain_loop(
    job: Job, workers: int, seconds: Sequence[float], steps: int, by_age: bool = False
) -> tuple[dict[str, Tensor], list[int]]:
    """Asynchronous SGD written down: no servers, no messages, no clipping, no buffers. Parameters after
    `steps` updates, and the ages."""
    seed_everything(model_seed(job.seed))
    model = job.model()
    named = list(model.named_parameters())
    optimizer: Any = job.optimizer(named)
    data, ages = job.data(), list[int]()
    order = [index for epoch in range(9) for index in sample_order(job.seed, epoch, len(data), True)]
    size = job.batch_size // workers
    local = copy.deepcopy(model)
    now = lambda: [each.detach().clone() for _, each in named]  # noqa: E731
    # done at, tie, worker, share, version, parameters
    events = [(seconds[worker], worker, worker, worker, 0, now()) for worker in range(workers)]
    heapq.heapify(events)
    taken, ties = workers, workers
    for version in range(steps):
        at, _, worker, share, given, values = heapq.heappop(events)
        with torch.no_grad():
            for each, value in zip(local.parameters(), values, strict=True):
                each.copy_(value)
        samples = [data[index] for index in order[share * size : (share + 1) * size]]
        loss = job.loss(local, torch.utils.data.default_collate(samples))
        gradients = torch.autograd.grad(loss, list(local.parameters()))
        for (_, each), gradient in zip(named, gradients, strict=True):
            each.grad = gradient
        age = version - given
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate / max(1, age) if by_age else rate
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        ages.append(age)
        if taken < steps:  # no more shares are given out than there will be updates
            heapq.heappush(events, (at + seconds[worker], ties, worker, taken, version + 1, now()))
        taken, ties = taken + 1, ties + 1
    return {name: each.detach() for name, each in named}, ages


def doubled(**overrides: Any) -> Job:
    """MLP, SGD with momentum, float64, batches that cut evenly: 32 samples, batches of 8."""
    job = make_job(
        "mlp",
        "sgd",
        scheduler=None,
        clip_grad_norm=None,
        batch_size=8,
        data=lambda: doubles(vectors(32)),
        **overrides,
    )
    return replace(job, model=lambda: MLP().double())


def doubles(samples: Samples) -> Samples:
    return Samples(
        **{name: each.double() if each.is_floating_point() else each for name, each in samples.fields.items()}
    )


@pytest.mark.parametrize("by_age", [False, True])
@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0, 1.0), (1.0, 1.1, 1.3, 3.7)])
def test_several_workers_are_a_plain_loop(seconds: tuple[float, ...], by_age: bool) -> None:
    job = doubled(steps=30)
    expected, ages = plain_loop(job, 4, seconds, 30, by_age)
    for servers in (1, 3):
        run = Run(
            job,
            f"dp=4,exchange=async,servers={servers},rate_by_age={str(by_age).lower()}",
            step_seconds=seconds,
        )
        assert run.ages == Counter(ages)
        for name, value in expected.items():
            # float64, other kernels for other layouts
            torch.testing.assert_close(run.state[name], value, rtol=1e-12, atol=1e-14)
    assert max(ages) >= 3


@pytest.mark.slow
def test_several_servers_are_one() -> None:
    """Clipping by the norm of the whole gradient included."""
    job = make_job("gpt", "sgd", steps=15)
    runs = [
        Run(job, f"dp=4,exchange=async,staleness=3,servers={servers}", step_seconds=(1, 1.1, 1.3, 3.7))
        for servers in (1, 2, 4)
    ]
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])
    assert runs[0].steps[-1].gradient_norm is not None


def test_a_run_repeats_to_the_bit() -> None:
    job = make_job("cnn", "adamw", steps=12)
    how: dict[str, Any] = {
        "step_seconds": (1, 2),
        "jitter": 0.4,
        "latency_seconds": 0.3,
        "incidents": "kill:1@4+join:1@6+server:0@9/1",
        "snapshot_every": 4,
    }
    runs = [Run(job, "dp=3,exchange=async,servers=2,staleness=2", **how) for _ in range(2)]
    assert same(runs[0], runs[1])
    assert [(each.loss, each.virtual_seconds) for each in runs[0].steps] == [
        (each.loss, each.virtual_seconds) for each in runs[1].steps
    ]


# --- What is shown.


def test_ages_and_seconds_are_those_of_the_speeds() -> None:
    job = doubled(steps=40)
    even = Run(job, "dp=4,exchange=async")
    # between a worker's pull and its push each of the others pushes once
    assert even.ages == {0: 1, 1: 1, 2: 1, 3: 37}
    assert even.seconds == 10  # 40 updates by 4 workers at one a second
    slow = {
        plan: Run(job, f"dp=4,exchange=async{plan}", step_seconds=(1, 1, 1, 3))
        for plan in ("", ",staleness=1", ",staleness=2")
    }
    assert slow[""].seconds == 12  # 3 1/3 updates a second
    assert slow[",staleness=1"].seconds == 30  # rounds of the slowest: 4 updates each 3 s
    assert slow[""].seconds < slow[",staleness=2"].seconds <= slow[",staleness=1"].seconds
    assert any("mean" in note and "ages" in note for note in even.notes)
    assert even.summary.shares.compute == pytest.approx(1.0)
    assert slow[",staleness=1"].summary.shares.waiting == pytest.approx(0.5)  # three of four wait 2 s of 3
    assert even.summary.predicted == even.summary.counted


def test_evaluation_and_checkpoints_are_of_their_update(tmp_path: Path) -> None:
    at = Evaluate(lambda: vectors(16), {"loss": class_loss}, every=5)
    run = Run(
        make_job("mlp", "sgd", steps=12, evaluate=at, checkpoint_every=4),
        "dp=3,exchange=async,servers=2",
        out=tmp_path,
        latency_seconds=0.2,
    )
    assert [step for step, _ in run.evaluations] == [5, 10, 12]
    assert run.saved == [4, 8, 12]
    with Trainer(
        make_job("mlp", "sgd", steps=12, evaluate=at), "dp=1", devices="simulated", listener=QUIET
    ) as trainer:
        trainer.replicas[0].model.load_state_dict(run.state)
        assert trainer.evaluate() == pytest.approx(run.evaluations[-1][1], rel=1e-6)  # sums of other chunks


def test_the_command_line_trains_asynchronously(tmp_path: Path) -> None:
    records = tmp_path / "records"
    assert main(
        ["train", "tests/job_file.py", "--plan", "dp=4,exchange=async,staleness=2", "--devices", "simulated", "--steps", "9", "--step-seconds", "1,1,3",
         "--latency-seconds", "0.1", "--incidents", "kill:1@2+join:1@4", "--out", str(tmp_path / "out"), "--json", str(records)]
    ) == 0  # fmt: skip
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    steps, last = [line for line in lines if "age" in line], lines[-1]
    assert [line["step"] for line in steps] == list(range(1, 10))
    assert steps[-1]["virtual_seconds"] > steps[0]["virtual_seconds"] > 1
    assert last["virtual_seconds"] >= steps[-1]["virtual_seconds"]  # until the workers have heard of it
    assert sum(last["ages"].values()) == 9
    assert main(["train", "tests/job_file.py", "--plan", "dp=4,exchange=async", "--devices", "cuda"]) == 2


# --- Coming, going and coming back.


def counting_job(**overrides: Any) -> Job:
    """The parameter of a sample is minus the number of times that it was in an update: its gradient is 1 in
    each, and SGD's rate is 1."""
    return Job(
        model=lambda: _Counts(29), loss=_count, optimizer=lambda named: torch.optim.SGD(named, lr=1.0), batch_size=6,
        data=lambda: Samples(index=torch.arange(29)), **{"steps": 14, **overrides},
    )  # fmt: skip


class _Counts(nn.Module):
    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(num_samples, dtype=torch.float64))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def forward(self, index: Tensor) -> Tensor:
        self.updates += 1
        return self.counts[index].sum()


def _count(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return model(batch["index"]), torch.ones(())


@given(
    happenings=st.lists(
        st.tuples(
            st.sampled_from(["join", "leave"]),
            st.integers(0, 3),
            st.sampled_from([0.0, 0.4, 1.0, 1.7, 3.0, 4.4, 6.0]),
        ),
        max_size=8,
    ),
    servers=st.integers(1, 3),
    staleness=st.sampled_from(["inf", "1", "3"]),
    latency=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=25, deadline=None, derandomize=True)
@pytest.mark.slow
def test_every_sample_of_an_epoch_is_used_once_while_workers_come_and_go(
    happenings: list[tuple[str, int, float]], servers: int, staleness: str, latency: float
) -> None:
    """29 samples in batches of 6 (the last of 5) for three workers are 15 shares an epoch; the last share of
    the second one is not in these 29 steps."""
    incidents = "+".join([*(f"{what}:{number}@{at}" for what, number, at in happenings), "join:5@30"])
    run = Run(
        counting_job(steps=30),
        f"dp=3,exchange=async,servers={servers},staleness={staleness}",
        incidents=incidents,
        latency_seconds=latency,
        snapshot_every=4,
    )
    assert run.state["counts"].tolist() == [-2.0] * 29
    assert int(run.state["updates"]) == 30


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    """With one worker nothing is under way at a snapshot, so the resumed run is the uninterrupted one, also
    with other servers."""
    job = make_job("cnn", "adamw", steps=11)
    Run(job, "dp=1,exchange=async,servers=2", steps=6, out=tmp_path)
    assert same(Run(job, "dp=1,exchange=async,servers=3", resume=tmp_path), Run(job, "dp=1"))


def test_a_run_that_is_asked_to_end_is_saved_first(tmp_path: Path) -> None:
    """At an update after which nothing is due; whoever resumes it begins with the share that was under way."""
    job, signalled = make_job("cnn", "adamw", steps=11), 5

    def step(progress: Progress) -> None:
        if progress.step == signalled:
            os.kill(os.getpid(), signal.SIGTERM)

    plan, listener = "dp=1,exchange=async,servers=2", replace(QUIET, step=step)
    with (
        Trainer(job, plan, devices="simulated", listener=listener, out=tmp_path) as trainer,
        pytest.raises(EndedError, match=f"Stopped by SIGTERM after update {signalled} of 11") as ended,
    ):
        trainer.fit()
    assert ended.value.exit_code == 143
    assert names_in(tmp_path) == ["step-00000005"]
    again = Run(job, "dp=1,exchange=async", resume=tmp_path)
    assert [each.step for each in again.steps] == list(range(signalled + 1, 12))
    assert same(again, Run(job, "dp=1"))


def test_checkpoints_of_earlier_versions_say_which_share_is_next() -> None:
    """Beside it they had those that were to be given out again."""
    state = {"ledger": {"next_share": 9, "free": [3, 7]}, "ages": {"0": 8}}
    values = {"asynchronous": {"dp": 3, "microbatches": 1, "state": state}}
    checkpoint: Any = SimpleNamespace(check=lambda _: None, check_data=lambda _: None, values=values)
    job, plan = counting_job(), Plan.parse("dp=3,exchange=async")
    found = read_state(checkpoint, job, plan, PushShares(job, plan), job.model())
    assert found == {"next_share": 9, "ages": {"0": 8}}


def test_an_asynchronous_run_goes_on_from_a_synchronous_checkpoint(tmp_path: Path) -> None:
    job = counting_job(steps=20)
    Run(job, "dp=3", steps=3, out=tmp_path)  # three batches: 9 of 15 shares
    done = Run(job, "dp=3,exchange=async", resume=tmp_path, steps=9)
    seen = Counter(done.state["counts"].tolist())
    assert seen == {-1 / 3: 18, -1.0: 11}  # a synchronous update is the mean over three replicas
    with pytest.raises(CheckpointError, match="exchange=async"):
        Run(job, "dp=3", resume=Path(done.summary.checkpoint or save_one(job, tmp_path)))


def save_one(job: Job, directory: Path) -> Path:
    return Path(str(Run(job, "dp=3,exchange=async", steps=2, out=directory / "other").summary.checkpoint))


# --- Shares and division.


@pytest.mark.parametrize(
    ("plan", "drop_last"), [("dp=3,microbatches=2", False), ("dp=8", False), ("dp=2", True)]
)
def test_shares_are_the_replicas_shares(plan: str, drop_last: bool) -> None:
    job = make_job("mlp", "sgd", drop_last=drop_last)  # 30 samples: 12, 12 and 6
    shares = PushShares(job, Plan.parse(plan))
    for epoch in range(2):
        indices = [
            index
            for number in range(shares.per_epoch)
            for index in shares.find(epoch * shares.per_epoch + number).indices
        ]
        assert indices == sample_order(job.seed, epoch, 30, True)[: 24 if drop_last else 30]
    with Trainer(job, plan, devices="simulated", listener=QUIET) as trainer:
        batches = [batch for batch in trainer.batches() if trainer.step(batch) > 0]
    synchronous = [chunk for batch in batches for chunk in batch.chunks if chunk.samples]
    asynchronous = [chunk for number in range(shares.per_epoch) for chunk in shares.read(number)]
    for here, there in zip(asynchronous, synchronous, strict=False):
        assert (here.step, here.index, here.samples) == (there.step, there.index, there.samples)
        assert torch.equal(here.data["x"], there.data["x"])


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=8),
    num_servers=st.integers(1, 5),
    halves=st.booleans(),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_every_element_has_one_server(sizes: list[int], num_servers: int, halves: bool) -> None:
    dtypes = [torch.float16 if halves and number % 2 else torch.float64 for number in range(len(sizes))]
    named = [
        (f"p{number}", nn.Parameter(torch.zeros(size, dtype=dtype)))
        for number, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True))
    ]
    parts = divide_over_servers(named, num_servers, whole=False)
    for _, parameter in named:
        slices = sorted(
            (each.start, each.stop) for part in parts for each in part if each.parameter is parameter
        )
        assert [element for start, stop in slices for element in range(start, stop)] == list(
            range(parameter.numel())
        )
    loads = [sum((each.stop - each.start) * each.parameter.element_size() for each in part) for part in parts]
    assert max(loads) - min(loads) <= 2 * 8  # an element at either end


# --- What is refused.


def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path: Path) -> None:
    job = make_job("mlp", "sgd", steps=3)
    iterable = make_job("mlp", "sgd", data=lambda: iter([]))
    frozen = replace(make_job("mlp", "sgd"), model=lambda: MLP().requires_grad_(False))
    cases: list[tuple[Callable[[], Any], type[MeshloomError], str]] = [
        (
            lambda: next(iter(open_trainer(job, "dp=2,exchange=async").batches())),
            PlanError,
            "Use Trainer.fit",
        ),
        (lambda: Run(iterable, "dp=2,exchange=async"), JobError, "iterable"),
        (lambda: Run(replace(job, model=cache(MLP)), "dp=2,exchange=async"), JobError, "same module twice"),
        (lambda: Run(frozen, "dp=2,exchange=async"), JobError, "no trainable"),
        (lambda: Run(job, "dp=2", latency_seconds=1.0), PlanError, "virtual clock"),
        (lambda: Run(job, "dp=2,exchange=async", step_seconds=(0.0,)), PlanError, "above 0"),
        (lambda: Run(job, "dp=2,exchange=async", snapshot_every=0), JobError, "snapshot_every=0"),
        (
            lambda: Run(job, "dp=2,exchange=async", incidents="kill:0@1+kill:1@1"),
            TrainingError,
            "no worker is left",
        ),
        (
            lambda: Run(make_job("mlp", "adafactor"), "dp=2,exchange=async,servers=7"),
            PlanError,
            "servers=7 is more than the 6 parameters",
        ),
        (lambda: parse_incidents("stumble:1@3"), PlanError, "no incident"),
    ]
    for call, kind, words in cases:
        with pytest.raises(kind, match=words):
            call()


def open_trainer(job: Job, plan: str) -> Trainer:
    return Trainer(job, plan, devices="simulated", listener=QUIET)


def test_a_run_on_processes_is_asked_like_any_other(tmp_path: Path) -> None:
    """It had `fit` alone, so whatever shows or ends a run needed to know which kind it is."""
    at = Evaluate(lambda: vectors(16), {"loss": class_loss}, every=5)
    job = make_job("mlp", "sgd", steps=12, evaluate=at)
    launched = ProcessRun(job, Plan.parse("dp=2,exchange=async"), AsynchronousSettings(steps=12), QUIET, "")
    with closing(launched) as run, open_trainer(job, "dp=2,exchange=async") as trainer:
        assert trainer.asynchronous
        others: list[TrainingRun] = [run, trainer.asynchronous]
        assert [each.next_step for each in others] == [0, 0]
        assert run.evaluate() == others[1].evaluate()
        for each in others:
            for call in (each.batches, lambda each=each: each.step(Batch(0, []))):
                with pytest.raises(PlanError, match="no steps that all workers take together"):
                    call()
            with pytest.raises(CheckpointError, match="DIRECTORY"):
                each.save()
            assert each.summary(1.0, {}, None).steps == 0


def test_a_loss_that_is_no_number_is_named() -> None:
    with pytest.raises(TrainingError, match=r"Worker 0: The loss of step 0 is nan"):
        Run(
            make_job("mlp", "sgd", loss=lambda model, batch: class_loss(model, batch) * torch.nan),
            "dp=2,exchange=async",
        )
    with pytest.raises(DataError, match="sum to 0"):
        Run(
            make_job("mlp", "sgd", loss=lambda model, batch: (class_loss(model, batch), 0.0)),
            "dp=2,exchange=async",
        )


def test_a_gradient_that_is_no_number_is_the_worker_s_that_has_computed_it() -> None:
    """It was applied, and the run ended with the next worker, whose loss was no number at parameters that
    somebody else had broken."""
    job = make_job("mlp", "sgd")
    third = [0]

    def rooted_once(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        third[0] += 1
        rooted = (model(batch["x"])[0, 0] * 0.0).sqrt() if third[0] == 3 else 0.0
        return class_loss(model, batch) + rooted

    with pytest.raises(
        TrainingError,
        match=r"The gradient of worker 2's share of batch 0 is not finite, although its loss is \d.*that of \S+\. It was not",
    ):
        Run(replace(job, loss=rooted_once), "dp=3,exchange=async")


def test_parameters_that_are_no_numbers_are_not_the_next_worker_s_fault() -> None:
    job = make_job("mlp", "sgd")
    with pytest.raises(
        TrainingError,
        match=r"is nan: rank 0, whose parameter \S+ was not finite before the step\.",
    ):
        Run(
            replace(
                job, optimizer=lambda named: torch.optim.SGD([each for _, each in named], lr=float("inf"))
            ),
            "dp=2,exchange=async",
        )
