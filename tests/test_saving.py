"""Whatever happens while a checkpoint is saved, the one before it is whole."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from saving_jobs import (
    names_in,
    save_step,
    slices_of,
    state_of,
    weights_of,
    written_across_hosts,
    written_in_parallel,
)

from meshloom.checkpoint.checkpoint import Checkpoint, find
from meshloom.checkpoint.format import Piece, fingerprint_of
from meshloom.checkpoint.writing import across_hosts, saving
from meshloom.checkpoint.writing import parallel as parallel_writing
from meshloom.checkpoint.writing.saving import save
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.errors import CheckpointError
from meshloom.core.units import format_bytes


def assert_whole(path, content):
    checkpoint = Checkpoint.open(path)
    assert checkpoint.values == {"epoch": content}
    assert all(
        torch.equal(checkpoint.weights()[name], weight) for name, weight in weights_of(content).items()
    )
    for key, tensor in state_of(content).items():
        assert torch.equal(checkpoint.read(key, 0, tensor.numel()), tensor.flatten())


def in_child(action):
    """Run `action` in a forked process; its exit code. No file handle or handler of an exception outlives it:
    as a kill -9 would."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException:
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(number, action):
    """`action`, killed just before its file operation `number`; counted are all that Python audits, and
    fsync."""
    counted = 0

    def count(*_):
        nonlocal counted
        counted += 1
        if counted == number:
            os.kill(os.getpid(), 9)

    def hook(event, _):
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            count()

    def body():
        real = os.fsync
        os.fsync = lambda descriptor: (count(), real(descriptor))
        sys.addaudithook(hook)  # stays for ever, which in this process is short
        action()

    return in_child(body)


def crash_everywhere(template, directory, old, new, writing):
    """Save step `new` over a copy of `template`, killed at each operation in turn.

    Every time there is a whole checkpoint, the old one up to some moment and the new one after it, and the
    next save goes well and tidies up.
    """
    found = []
    for number in range(1, 200):
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(template, directory)
        code = killed_at(number, lambda: save_step(directory, new, keep=1, writing=writing))
        found.append(Checkpoint.open(directory).values["epoch"])
        assert_whole(directory, found[-1])
        save_step(directory, new, keep=1)
        assert names_in(directory) == [f"step-{new:08d}"]
        assert_whole(directory, new)
        if code == 0:
            break
        assert code == -9
    kept = found.index(new)
    assert number > 20 and found == [old] * kept + [new] * (number - kept)


@pytest.mark.processes
@pytest.mark.parametrize("writing", [written_across_hosts, written_in_parallel])
@pytest.mark.slow
@pytest.mark.every
def test_kill_at_any_file_operation_leaves_a_whole_checkpoint(writing, tmp_path):
    save_step(tmp_path / "template", 1)
    crash_everywhere(tmp_path / "template", tmp_path / "run", old=1, new=2, writing=writing)


@pytest.mark.processes
@pytest.mark.slow
def test_kill_while_saving_a_step_again_leaves_a_whole_checkpoint(tmp_path):
    save_step(tmp_path / "template", 2, content=1)
    crash_everywhere(tmp_path / "template", tmp_path / "run", old=1, new=2, writing=written_in_parallel)


@pytest.mark.processes
def test_kill_of_the_first_save_leaves_nothing_that_counts(tmp_path):
    for number in range(1, 12):
        directory = tmp_path / f"run-{number}"
        assert killed_at(number, lambda directory=directory: save_step(directory, 1)) == -9
        with pytest.raises(CheckpointError, match=r"There is no (checkpoint in|directory)"):
            find(directory)
        save_step(directory, 1)
        assert names_in(directory) == ["step-00000001"]


def test_full_disk_is_one_sentence_on_every_rank(tmp_path, monkeypatch):
    save_step(tmp_path, 1)
    real, calls, sentences = across_hosts.create_files, [], []

    def create(temporary, files):
        calls.append([each.name for each in files])
        if any(name.startswith("state-00001") for name in calls[-1]):
            (temporary / "part").write_bytes(b"part")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(temporary, files)

    monkeypatch.setattr(across_hosts, "create_files", create)

    def rank(group):
        write = written_across_hosts(weights_of(2), slices_of(state_of(2), group.rank, 3))
        meta = {"values": None, "fingerprint": {}, "plan_text": "dp=3", "keep": 2}
        try:
            save(tmp_path, 2, write=write, group=group, **meta)
        except CheckpointError as error:
            sentences.append(str(error))

    in_turns([partial(rank, group) for group in simulated_groups(3)])
    # the number itself changes all the time
    free = format_bytes(shutil.disk_usage(tmp_path).free).split()[1]
    assert len(sentences) == 3 and len(set(sentences)) == 1
    assert re.match(
        rf"Rank 2 cannot save step 2 in {tmp_path}: No space left on device. It needs [\d.]+ B there, and ",
        sentences[0],
    )
    assert sentences[0].endswith(
        f" {free} are free. The checkpoint before it is whole: {tmp_path / 'step-00000001'}."
    )
    assert names_in(tmp_path) == ["step-00000001"] and len(calls) == 3  # the others had written
    assert_whole(tmp_path, 1)


def test_a_full_disk_is_found_before_anything_is_written(tmp_path, monkeypatch):
    save_step(tmp_path, 1)

    def full(descriptor, start, count):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(parallel_writing, "write_parts", lambda *_: pytest.fail("it wrote"))
    with pytest.raises(
        CheckpointError,
        match=r"^Rank 0 cannot save step 2 in .*: No space left on device. It needs 168 B there, and .* are free. The checkpoint before it is whole",
    ):
        save_step(tmp_path, 2)
    assert names_in(tmp_path) == ["step-00000001"]
    assert_whole(tmp_path, 1)


@pytest.mark.processes
def test_limit_of_the_system_on_file_size(tmp_path):
    save_step(tmp_path, 1)

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            save_step(tmp_path, 2, weights={"w": torch.ones(1000)})
        except CheckpointError as error:
            os._exit(
                0
                if "Rank 0 cannot save step 2" in str(error)
                and "File too large. It needs 3.99 KiB there" in str(error)
                else 4
            )

    assert in_child(limited) == 0
    assert names_in(tmp_path) == ["step-00000001"]
    assert_whole(tmp_path, 1)


@pytest.mark.parametrize("failing", ["mkdir", "rename", "meta"])
def test_rank_0_that_cannot_work_in_the_directory(failing, tmp_path, monkeypatch):
    save_step(tmp_path, 1)

    def fail(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", "somewhere")

    if failing == "meta":
        monkeypatch.setattr(saving, "meta_text", fail)
    else:
        real = getattr(Path, failing)
        monkeypatch.setattr(
            Path,
            failing,
            lambda self, *a, **k: (
                fail() if self.name.startswith((".saving", "meta")) else real(self, *a, **k)
            ),
        )
    with pytest.raises(
        CheckpointError,
        match=r"Rank 0 cannot save step 2 in .*: Permission denied \(somewhere\). The checkpoint before it is whole",
    ):
        save_step(tmp_path, 2)
    assert names_in(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize(
    ("writing", "found"),
    [
        (written_across_hosts, ".*safetensors, which another rank wrote, is missing"),
        (written_in_parallel, "its .*/other/.saving-step-00000001 is not the one that rank 0 made"),
    ],
)
def test_directory_that_the_ranks_do_not_share(writing, found, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"

    def save_apart():
        everyone = {
            "values": None,
            "fingerprint": {},
            "plan_text": "dp=2",
            "keep": 2,
        }
        in_turns(
            [
                partial(save, directory, 1, group=group, write=writing(weights_of(1), []), **everyone)
                for directory, group in zip((one, other), simulated_groups(2), strict=True)
            ]
        )

    with pytest.raises(
        CheckpointError,
        match=r"Rank 1 cannot save step 1 in .*: it does not see .*, which rank 0 made; all ranks must save to one",
    ):
        save_apart()
    (other / ".saving-step-00000001").mkdir(parents=True)  # each machine has such a directory of its own
    with pytest.raises(
        CheckpointError,
        match=f"{found}; all ranks must save to one",
    ):
        save_apart()
    assert names_in(one) == []


def test_an_interrupted_save_removes_what_it_wrote(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    save_step(tmp_path, 1)
    for module in (across_hosts, parallel_writing):
        monkeypatch.setattr(module, "write_parts", interrupt)
    for writing in (written_across_hosts, written_in_parallel):
        with pytest.raises(KeyboardInterrupt):
            save_step(tmp_path, 2, writing=writing)
    assert names_in(tmp_path) == ["step-00000001"]


def test_older_checkpoints_are_removed_in_the_order_they_were_saved(tmp_path):
    for step in (10, 20, 30):
        save_step(tmp_path, step, keep=2)
    assert names_in(tmp_path) == ["step-00000020", "step-00000030"]
    save_step(tmp_path, 25, keep=2)  # a run that went back to step 20
    assert names_in(tmp_path) == ["step-00000025", "step-00000030"]
    assert find(tmp_path).name == "step-00000025"
    save_step(tmp_path, 30, keep=2)
    assert names_in(tmp_path) == ["step-00000025", "step-00000030"]
    assert find(tmp_path).name == "step-00000030"


def test_other_files_in_the_directory_are_left_alone(tmp_path):
    (tmp_path / "log.txt").write_text("mine")
    (tmp_path / "step-notes").mkdir()
    for step in (1, 2):
        save_step(tmp_path, step, keep=1)
    assert names_in(tmp_path) == ["log.txt", "step-00000002", "step-notes"]


def test_values_and_the_fingerprint_are_rank_0s(tmp_path):
    def rank(group):
        fingerprint = fingerprint_of(weights_of(1).items()) if group.rank == 0 else {}
        settings = {"fingerprint": fingerprint, "plan_text": "dp=2", "group": group, "keep": 1}
        save(tmp_path, 1, write=written_across_hosts(weights_of(1), []), values=group.rank, **settings)

    in_turns([partial(rank, group) for group in simulated_groups(2)])
    checkpoint = Checkpoint.open(tmp_path)
    assert torch.equal(checkpoint.weights()["scale"], weights_of(1)["scale"]) and checkpoint.values == 0
    checkpoint.check(fingerprint_of(weights_of(1).items()))


def test_pieces_without_elements(tmp_path):
    save_step(tmp_path, 1, pieces=lambda rank: [Piece("empty", torch.ones(0), 0, 0, (0, 3))])
    assert Checkpoint.open(tmp_path).read("empty", 0, 0).shape == (0,)
