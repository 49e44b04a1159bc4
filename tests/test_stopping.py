"""SIGTERM and Ctrl-C save a checkpoint first, at a step that all ranks agree on; a second one does not
wait."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jobs import make_job
from saving_jobs import names_in

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.launch.processes import signals
from meshloom.replica.expected_bytes import expected_bytes
from meshloom.telemetry.progress import QUIET, Listener
from meshloom.telemetry.traffic import Traffic
from meshloom.train.trainer import Trainer
from tests.fitted import fitted


def at_step(step: int, act: Callable[[], None]) -> Listener:
    return Listener(
        started=lambda text: None,
        note=lambda text: None,
        step=lambda progress: act() if progress.step == step else None,
    )


def interrupted_twice() -> None:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=2,exchange=local_sgd,local_steps=2"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.long
def test_a_signal_saves_first_and_the_run_goes_on_from_there(
    number: signal.Signals, plan: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run that a cluster preempted lost everything since its last checkpoint, which may have been its first
    step."""
    job = make_job("mlp", "adamw", steps=6)
    before = [signal.getsignal(each) for each in signals.ASKING]
    listener = at_step(3, lambda: signal.raise_signal(number))
    with (
        pytest.raises(SystemExit) as ended,
        Trainer(job, plan, devices="simulated", out=tmp_path, listener=listener) as trainer,
    ):
        trainer.fit()
    assert ended.value.code == 128 + number
    sentence = (
        f"Stopped by {number.name} after step 3 of 6, which is saved. Go on with --resume {tmp_path}.\n"
    )
    assert capfd.readouterr().err.endswith(sentence)
    assert names_in(tmp_path) == ["step-00000003"] and Checkpoint.open(tmp_path).step == 3
    assert [signal.getsignal(each) for each in signals.ASKING] == before
    if "local" not in plan:  # a save ends a round
        with (
            Trainer(job, plan, devices="simulated", listener=QUIET) as whole,
            Trainer(job, plan, devices="simulated", resume=tmp_path, listener=QUIET) as rest,
        ):
            assert rest.fit().last_loss == whole.fit().last_loss


def test_a_checkpoint_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    seen: list[int] = []
    listener = Listener(
        started=lambda text: None,
        saved=lambda step, path: (seen.append(step), signal.raise_signal(signal.SIGTERM))[0],
    )
    with (
        pytest.raises(SystemExit),
        Trainer(
            make_job("mlp", "sgd", checkpoint_every=1),
            "dp=2",
            devices="simulated",
            out=tmp_path,
            listener=listener,
        ) as trainer,
    ):
        trainer.fit()
    assert seen == [1]


def test_a_run_that_is_done_anyway_ends_well(tmp_path: Path) -> None:
    listener = at_step(3, lambda: signal.raise_signal(signal.SIGTERM))
    with Trainer(
        make_job("mlp", "sgd", steps=3), "dp=2", devices="simulated", out=tmp_path, listener=listener
    ) as trainer:
        assert trainer.fit().steps == 3


def test_an_own_loop_finishes_its_turn(tmp_path: Path) -> None:
    turns: list[int] = []

    def loop(trainer: Trainer) -> None:
        for batch in trainer.batches():
            if batch.step == 2:
                signal.raise_signal(signal.SIGINT)
            trainer.step(batch)
            turns.append(batch.step)

    with (
        Trainer(
            make_job("mlp", "sgd", steps=6), "dp=2", devices="simulated", out=tmp_path, listener=QUIET
        ) as trainer,
        pytest.raises(SystemExit),
    ):
        loop(trainer)
    assert turns == [0, 1, 2] and names_in(tmp_path) == ["step-00000003"]


def test_a_second_signal_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "ONE_REQUEST_SECONDS", 0.0)

    listener = at_step(2, interrupted_twice)
    with (
        pytest.raises(KeyboardInterrupt),
        Trainer(
            make_job("mlp", "sgd"), "dp=2", devices="simulated", out=tmp_path, listener=listener
        ) as trainer,
    ):
        trainer.fit()
    assert names_in(tmp_path) == []


def test_two_signals_of_one_ctrl_c_are_one(tmp_path: Path) -> None:
    """torchrun hands on the Ctrl-C that the terminal sent to the ranks already. A GPU's step is told after the next."""

    listener = at_step(2, interrupted_twice)
    with (
        pytest.raises(SystemExit),
        Trainer(
            make_job("mlp", "sgd", steps=4), "dp=2", devices="simulated", out=tmp_path, listener=listener
        ) as trainer,
    ):
        trainer.fit()
    assert names_in(tmp_path) in (["step-00000002"], ["step-00000003"])


@pytest.mark.long
def test_without_a_directory_or_a_step_it_simply_ends(tmp_path: Path) -> None:
    interrupt = at_step(2, lambda: signal.raise_signal(signal.SIGINT))
    with (
        pytest.raises(KeyboardInterrupt),
        Trainer(make_job("mlp", "sgd"), "dp=2", devices="simulated", listener=interrupt) as trainer,
    ):
        trainer.fit()
    with Trainer(
        make_job("mlp", "sgd"), "dp=2", devices="simulated", out=tmp_path, listener=QUIET
    ) as trainer:
        next(batches := trainer.batches())
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        batches.close()
    assert names_in(tmp_path) == []


def test_a_handler_of_the_users_own_stays(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        listener = at_step(2, lambda: signal.raise_signal(signal.SIGTERM))
        fitted(make_job("mlp", "sgd"), "dp=2", out=tmp_path, listener=listener)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


@pytest.mark.processes
def test_a_process_that_was_forked_ends_as_it_is_told(tmp_path: Path) -> None:
    """Whoever ends a pool of processes of his own sends them SIGTERM."""
    requests = signals.StopRequests()
    requests.open()
    try:
        requests.arm()
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGINT)  # of the terminal: nothing happens
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    finally:
        requests.close()
    assert not requests.received


@pytest.mark.usefixtures("silent_export")
@pytest.mark.parametrize("asked", [0, 3, 6])
@pytest.mark.slow
def test_all_ranks_learn_in_the_same_step_what_one_was_asked(asked: int, tmp_path: Path) -> None:
    """Ranks are told one after another, and some may not be told at all."""
    with Trainer(
        make_job("mlp", "sgd", steps=4), "dp=2,pp=2,tp=2", devices="simulated", out=tmp_path, listener=QUIET
    ) as trainer:
        told: list[list[bool]] = []
        for batch in trainer.batches():
            for rank, replica in enumerate(trainer.replicas):
                replica.sums.asks = partial(bool, batch.step == 1 and rank == asked)
            results: list[Any] = trainer.together(
                lambda replica: replica.step(batch.step, batch.shares[trainer.replicas.index(replica)])  # noqa: B023
            )
            trainer.synchronous.next_step = batch.step + 1  # type: ignore[union-attr]
            told.append([each.asked for each in results])
        assert told == [[False] * 8, [True] * 8, [False] * 8, [False] * 8]
        for replica in trainer.replicas:
            counted = Traffic.of({axis: replica.context.groups[axis].counts for axis in ("pp", "tp")})
            assert expected_bytes(replica).after(steps=4).over(counted.bytes) == counted


def test_bytes_are_predicted_with_a_directory_too(tmp_path: Path) -> None:
    summary = fitted(make_job("mlp", "sgd"), "dp=2", out=tmp_path, listener=QUIET)
    assert summary.predicted.bytes == summary.counted.bytes
