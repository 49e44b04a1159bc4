"""A checkpoint gives back what was saved, on any number of ranks, or says in one sentence why not."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saving_jobs import (
    SHAPES,
    save_step,
    slices_of,
    state_of,
    weights_of,
    written_across_hosts,
    written_in_parallel,
)

from meshloom.checkpoint import format as layout
from meshloom.checkpoint.checkpoint import Checkpoint, check_same_data, find, fingerprint_of
from meshloom.checkpoint.mapped_tensors import MappedTensors
from meshloom.core.errors import CheckpointError


@pytest.mark.parametrize("writing", [written_across_hosts, written_in_parallel])
@pytest.mark.parametrize("saved_on", [1, 2, 3, 8])
def test_slices_saved_on_some_ranks_are_read_on_others(saved_on, writing, tmp_path):
    path = save_step(tmp_path, 7, num_ranks=saved_on, writing=writing)
    checkpoint = Checkpoint.open(tmp_path)
    assert (checkpoint.path, checkpoint.step, checkpoint.values, checkpoint.plan_text) == (
        path,
        7,
        {"epoch": 7},
        f"dp={saved_on}",
    )
    assert sorted(checkpoint.keys()) == sorted(state_of(7))
    for num_ranks in (1, 2, 3, 8):
        for rank in range(num_ranks):
            for piece in slices_of(state_of(7), rank, num_ranks):
                assert torch.equal(checkpoint.read(piece.key, piece.start, piece.stop), piece.tensor)
                assert checkpoint.shape(piece.key) == piece.shape


@pytest.mark.long
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_any_range_is_read_from_whatever_pieces_hold_it(data, tmp_path_factory):
    cuts = sorted(data.draw(st.sets(st.integers(1, 19), max_size=6)))
    whole = torch.arange(20.0)
    bounds = list(zip([0, *cuts], [*cuts, 20], strict=True))
    owners = [data.draw(st.integers(0, 2)) for _ in bounds]

    def pieces(rank):
        return [
            layout.Piece("x", whole[a:b], a, b, (4, 5))
            for (a, b), owner in zip(bounds, owners, strict=True)
            if owner == rank
        ]

    writing = data.draw(st.sampled_from([written_across_hosts, written_in_parallel]))
    directory = tmp_path_factory.mktemp("any")
    save_step(directory, 1, num_ranks=3, pieces=pieces, writing=writing)
    start = data.draw(st.integers(0, 20))
    stop = data.draw(st.integers(start, 20))
    assert torch.equal(Checkpoint.open(directory).read("x", start, stop), whole[start:stop])


def test_only_the_files_that_hold_the_range_are_opened(tmp_path, monkeypatch):
    save_step(tmp_path, 1, num_ranks=3, writing=written_across_hosts)
    checkpoint = Checkpoint.open(tmp_path)
    opened = []

    def mapped(files):
        opened.extend(file.name for file in files)
        return MappedTensors(files)

    monkeypatch.setattr("meshloom.checkpoint.checkpoint.MappedTensors", mapped)
    checkpoint.read("optimizer/blocks.0.up.weight/exp_avg", 6, 9)
    assert opened == ["state-00000-of-00002.safetensors"]


def test_elements_and_keys_that_are_not_there(tmp_path):
    save_step(tmp_path, 1)
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(
        CheckpointError, match="has no elements 15 to 16 of optimizer/blocks.0.up.weight/exp_avg"
    ):
        checkpoint.read("optimizer/blocks.0.up.weight/exp_avg", 14, 16)
    with pytest.raises(
        CheckpointError,
        match="has nothing called optimizer/scale/square. It was saved with another optimizer",
    ):
        checkpoint.read("optimizer/scale/square", 0, 1)


def test_values_come_back_as_they_were(tmp_path):
    values = {"floats": [0.1, 1e-320, float("inf")], "nested": {"none": None, "text": "µ", "big": 2**90}}
    save_step(tmp_path, 1, values=values)
    assert Checkpoint.open(tmp_path).values == values


def damage(path, how):
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-3])
    elif how == "changed":
        text = bytearray(path.read_bytes())
        text[-1] ^= 1
        path.write_bytes(text)
    else:
        path.unlink()


@pytest.mark.parametrize("file", ["model.safetensors", "state-00000-of-00001.safetensors"])
@pytest.mark.parametrize("how", ["truncated", "changed", "missing"])
def test_damaged_file_is_named_with_the_newest_other_checkpoint(how, file, tmp_path):
    older, newer = save_step(tmp_path, 1), save_step(tmp_path, 2)
    size = (newer / file).stat().st_size
    damage(newer / file, how)
    reason = {
        "truncated": rf"is truncated or overwritten: it has {size - 3} bytes, and {size} were written",
        "changed": "is damaged: it has as many bytes as were written, but not the same ones",
        "missing": "is missing",
    }[how]
    with pytest.raises(
        CheckpointError, match=rf"{newer / file} {reason}. The newest other whole checkpoint is {older}\.$"
    ):
        Checkpoint.open(tmp_path)
    assert Checkpoint.open(older).step == 1
    damage(older / file, how)
    with pytest.raises(CheckpointError, match=rf"There is no other whole checkpoint in {tmp_path}\.$"):
        Checkpoint.open(tmp_path)


def test_damaged_meta_is_not_passed_over(tmp_path):
    older, newer = save_step(tmp_path, 1), save_step(tmp_path, 2)
    damage(newer / "meta.json", "truncated")
    with pytest.raises(
        CheckpointError,
        match=rf"{newer / 'meta.json'} is damaged: .* The newest other whole checkpoint is {older}\.$",
    ):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "where", ["../secret.safetensors", "/secret.safetensors", "a/secret.safetensors", "..", ""]
)
@pytest.mark.parametrize("key", ["files", "pieces"])
def test_meta_that_names_a_file_elsewhere_is_refused(key, where, tmp_path):
    """A checkpoint that somebody else gave could have any file of the user's read, and the weights of another
    directory loaded."""
    path = save_step(tmp_path / "run", 1)
    body = layout.read_meta(path)
    name = next(iter(body["files"]))
    if key == "files":
        body["files"][where] = body["files"].pop(name)
    else:
        next(iter(body["pieces"].values()))["parts"][0][0] = where
    (path / "meta.json").write_text(layout.meta_text(body))
    with pytest.raises(
        CheckpointError, match=f"meta.json names the file {where}, which does not lie in this directory"
    ):
        Checkpoint.open(path)


def test_a_link_that_leads_out_of_a_checkpoint_is_refused(tmp_path):
    path = save_step(tmp_path / "run", 1)
    (path / "model.safetensors").rename(tmp_path / "elsewhere")
    (path / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        CheckpointError, match="names the file model.safetensors, which does not lie in this directory"
    ):
        Checkpoint.open(path)
    moved = (tmp_path / "run").rename(tmp_path / "linked")
    (tmp_path / "run").symlink_to(moved)  # a run's directory itself may be reached by a link
    (path / "model.safetensors").unlink()
    (tmp_path / "elsewhere").rename(path / "model.safetensors")
    assert Checkpoint.open(path).step == 1


def test_without_checksums_sizes_are_checked(tmp_path):
    path = save_step(tmp_path, 1)
    damage(path / "model.safetensors", "changed")
    assert Checkpoint.open(tmp_path, checksums=False).step == 1
    damage(path / "model.safetensors", "truncated")
    with pytest.raises(CheckpointError, match="truncated"):
        Checkpoint.open(tmp_path, checksums=False)


def test_another_version_of_the_format(tmp_path, monkeypatch):
    path = save_step(tmp_path, 1)
    body = json.loads((path / "meta.json").read_text())["checkpoint"]
    (path / "meta.json").write_text(layout.meta_text({**body, "version": 3}))
    with pytest.raises(
        CheckpointError, match=r"has version 3 of the format, and this meshloom reads versions up to 2"
    ):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"blocks.0.up.weight": (5, 4)},
            r"parameter blocks.0.up.weight is 5 x 3 float32 in it and 5 x 4 float32 in this job\.$",
        ),
        ({"head": (2,)}, r"it has no parameter head, which is 2 float32 in this job\.$"),
        ({"scale": None}, r"its parameter scale \(scalar float32\) is not in this job\.$"),
    ],
)
def test_checkpoint_of_another_model(change, message, tmp_path):
    path = save_step(tmp_path, 1)
    shapes = {name: shape for name, shape in {**SHAPES, **change}.items() if shape is not None}
    with pytest.raises(CheckpointError, match=rf"^{path} is of another model: {message}"):
        Checkpoint.open(tmp_path).check(
            fingerprint_of((name, torch.ones(shape)) for name, shape in shapes.items())
        )


def test_checkpoint_in_another_dtype(tmp_path):
    save_step(tmp_path, 1)
    doubles = fingerprint_of((name, weight.double()) for name, weight in weights_of(1).items())
    with pytest.raises(CheckpointError, match="is 5 x 3 float32 in it and 5 x 3 float64 in this job"):
        Checkpoint.open(tmp_path).check(doubles)
    Checkpoint.open(tmp_path).check(fingerprint_of(weights_of(2).items()))


def test_a_run_that_cannot_go_on_from_here(tmp_path):
    save_step(tmp_path, 2)
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.check_steps_left(3)
    for steps, said in ((2, "2 steps"), (1, "1 step")):
        with pytest.raises(
            CheckpointError,
            match=rf"^The checkpoint is at step 2 and the run has {said}, so nothing is left. Give more with --steps.$",
        ):
            checkpoint.check_steps_left(steps)
    saved = {"dp": 4, "microbatches": 2, "state": None}
    check_same_data(saved, {"dp": 4, "microbatches": 2}, "the plan")
    with pytest.raises(
        CheckpointError,
        match=r"^The checkpoint was written with dp=4 and the plan has dp=3: the data .* Set dp=4, or start a new run.$",
    ):
        check_same_data(saved, {"dp": 3, "microbatches": 1}, "the plan")


def test_where_there_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"There is no directory .*nowhere to read a checkpoint from"):
        find(tmp_path / "nowhere")
    with pytest.raises(
        CheckpointError, match=r"There is no checkpoint in .* a first run starts without --resume"
    ):
        find(tmp_path)
    older, newer = save_step(tmp_path, 1), save_step(tmp_path, 2)
    damage(newer / "meta.json", "missing")
    with pytest.raises(
        CheckpointError,
        match=rf"{newer} has no meta.json, so it is no whole checkpoint. The newest other .* is {older}",
    ):
        find(newer)


def test_a_checkpoint_or_the_directory_of_its_run_is_found(tmp_path):
    older, newer = save_step(tmp_path, 1), save_step(tmp_path, 2)
    assert find(tmp_path) == newer and find(older) == older
