"""Files that all ranks write at once hold what one rank would have written, however tensors are divided."""

from __future__ import annotations

import itertools
import json
import math
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.checksums import shares_of
from meshloom.checkpoint.format import Piece
from meshloom.checkpoint.weights import open_weights
from meshloom.checkpoint.writing.file_layout import HeldSpan, division_of
from meshloom.checkpoint.writing.parallel import intervals_as_boxes, parallel
from meshloom.checkpoint.writing.saving import save
from meshloom.comm import pieces as blocks
from meshloom.comm.pieces import Pieces
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.errors import CheckpointError
from meshloom.telemetry.progress import QUIET
from meshloom.train import run_checkpoints
from meshloom.train.trainer import Trainer
from tests.jobs import make_job
from tests.saving_jobs import names_in, weights_of, written_in_parallel


def save_held(directory: Path, weights: list[list[Piece]], pieces: list[list[Piece]], **how: Any) -> Path:
    """Saves what each rank holds."""
    meta: dict[str, Any] = {"values": None, "fingerprint": {}, "plan_text": "", "keep": 1}
    return in_turns(
        [
            partial(
                save,
                directory,
                1,
                write=parallel(weights[group.rank], pieces[group.rank], **how),
                group=group,
                **meta,
            )
            for group in simulated_groups(len(weights))
        ]
    )[0]


@st.composite
def divided(draw: st.DrawFn) -> tuple[Pieces, int]:
    """A tensor's blocks on some ranks, each dim cut into runs that are dealt out or not, and the number of
    replicas that have slices of each block."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    num_ranks = draw(st.integers(1, 3))
    cut_dim = draw(st.integers(0, len(shape) - 1)) if shape else None
    rows: list[list[Any]] = [[None] * len(shape) for _ in range(num_ranks)]
    if cut_dim is not None:
        owner = [draw(st.integers(0, num_ranks - 1)) for _ in range(shape[cut_dim])]
        for rank in range(num_ranks):
            runs = [
                (group[0], group[-1] + 1)
                for key, found in itertools.groupby(range(shape[cut_dim]), key=lambda at: owner[at] == rank)
                if key and (group := list(found))
            ]
            rows[rank][cut_dim] = tuple(runs)
    return Pieces(shape, tuple(map(tuple, rows))), draw(st.integers(1, 3))


@settings(deadline=None, max_examples=60)
@given(divided(), st.sampled_from([torch.float32, torch.int8, torch.bfloat16]))
@pytest.mark.slow
def test_blocks_and_slices_of_blocks_are_written_to_their_places(
    tmp_path_factory: pytest.TempPathFactory, found: tuple[Pieces, int], dtype: torch.dtype
) -> None:
    pieces, replicas = found
    full = torch.arange(math.prod(pieces.shape)).reshape(pieces.shape).to(dtype)
    weights: list[list[Piece]] = []
    state: list[list[Piece]] = []
    for replica, rank in itertools.product(range(replicas), range(pieces.num_ranks)):
        flat, row = blocks.take(pieces, rank, full).reshape(-1), pieces.held[rank]
        start, stop = (flat.numel() * each // replicas for each in (replica, replica + 1))
        weights.append([Piece("w", flat, 0, flat.numel(), pieces.shape, row)])
        state.append([Piece("optimizer/w/m", flat[start:stop], start, stop, pieces.shape, row)])
    directory = tmp_path_factory.mktemp("run")
    save_held(directory, weights, state)
    checkpoint = Checkpoint.open(directory)
    assert torch.equal(checkpoint.weights()["w"], full)
    assert torch.equal(checkpoint.read("optimizer/w/m", 0, full.numel()), full.reshape(-1))


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
@pytest.mark.long
def test_boxes_of_an_interval_are_its_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    numbers = torch.arange(size).reshape(shape)
    found: list[int] = []
    for bounds, first in intervals_as_boxes(shape, start, stop):
        box = numbers[tuple(slice(*bound) for bound in bounds)]
        assert first == int(box.reshape(-1)[0])
        found += box.reshape(-1).tolist()
    assert found == list(range(start, stop))


def test_weights_are_divided_into_files_with_an_index(tmp_path: Path) -> None:
    weights = {f"w{number}": torch.randn(5, 7) for number in range(4)} | {"large": torch.randn(300)}
    held = [Piece(name, each.flatten(), 0, each.numel(), tuple(each.shape)) for name, each in weights.items()]
    pieces = [
        Piece("optimizer/w0/m", torch.ones(35), 0, 35, (5, 7)),
        Piece("optimizer/w1/m", torch.ones(35), 0, 35, (5, 7)),
    ]
    path = save_held(tmp_path, [held, held], [pieces, []], file_bytes=290)
    assert names_in(path) == [
        "meta.json", "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors",
        "model.safetensors.index.json", "state-00000-of-00001.safetensors",
    ]  # fmt: skip
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 4 * (4 * 35 + 300)}
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(path / file)[name], weights[name])
    opened = Checkpoint.open(path)
    for found in (opened.weights(), open_weights(path).entries):
        assert found.keys() == weights.keys()
    assert opened.meta["version"] == 2
    file = path / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="model-00002-of-00003.safetensors is damaged"):
        Checkpoint.open(path)


def test_one_file_is_version_1_as_older_releases_read_it(tmp_path: Path) -> None:
    whole = [Piece("w", torch.ones(3), 0, 3, (3,))]
    assert Checkpoint.open(save_held(tmp_path, [whole], [[]])).meta["version"] == 1


def test_what_several_ranks_hold_is_written_by_all_of_them() -> None:
    large = HeldSpan("weight", "w", 0, 90_000, (90_000,), torch.float32, None)
    small = [HeldSpan("weight", f"b{number}", 0, 10, (10,), torch.float32, None) for number in range(3)]
    parts = [division_of([[large, *small]] * 3, rank) for rank in range(3)]
    assert [each[0] for each in parts] == [(0, 30_000), (30_000, 60_000), (60_000, 90_000)]
    for number in range(3):  # one rank each
        assert sorted(each[1 + number] for each in parts) == [(0, 0), (0, 0), (0, 10)]


@pytest.mark.long
@given(st.dictionaries(st.text(max_size=2), st.integers(0, 50), max_size=5), st.integers(1, 6))
def test_shares_of_bytes_are_all_bytes_once(sizes: dict[str, int], num_ranks: int) -> None:
    found = [part for rank in range(num_ranks) for part in shares_of(sizes, rank, num_ranks)]
    assert all(
        sorted(at for name, start, stop in found if name == file for at in range(start, stop))
        == list(range(size))
        for file, size in sizes.items()
    )


def test_elements_that_no_rank_holds(tmp_path: Path) -> None:
    part = [Piece("w", torch.ones(2), 0, 2, (3,))]
    with pytest.raises(CheckpointError, match="cannot save step 1 .*no rank holds all elements of w"):
        save_held(tmp_path, [part, part], [[], []])
    row = [Piece("w", torch.ones(2), 0, 2, (4,), (((0, 2),),))]
    with pytest.raises(CheckpointError, match="cannot save step 1 .*no rank holds all elements of w"):
        save_held(tmp_path, [row, []], [[], []])
    assert names_in(tmp_path) == []


def test_checksums_are_of_the_files_as_they_are(tmp_path: Path) -> None:
    write = written_in_parallel(weights_of(1), [])
    saved = partial(save, tmp_path, 1, write=write, values=None, fingerprint={}, plan_text="", keep=1)
    config = {"config.json": b"{}"}
    held = in_turns([partial(saved, group=group, config_files=config) for group in simulated_groups(3)])[0]
    files = Checkpoint.open(held).meta["files"]
    assert sorted(files) == ["config.json", "model.safetensors", "state-00000-of-00001.safetensors"]
    for name, facts in files.items():
        text = (held / name).read_bytes()
        assert facts == {"bytes": len(text), "crc32": zlib.crc32(text)}


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp=2", "pp=2", "dp=2,zero=1", "dp=2,zero=3"])
def test_ranks_of_several_hosts_save_the_same_files(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("mlp", "adamw", steps=3)
    opened: list[Checkpoint] = []
    for name in ("one", "several"):
        if name == "several":
            hosts = itertools.count()
            monkeypatch.setattr(run_checkpoints, "host_identity", lambda hosts=hosts: f"host {next(hosts)}")
        with Trainer(job, plan, devices="simulated", steps=2, out=tmp_path / name, listener=QUIET) as trainer:
            trainer.fit()
        opened.append(Checkpoint.open(tmp_path / name))
    assert names_in(opened[0].path) == ["meta.json", "model.safetensors", "state-00000-of-00001.safetensors"]
    assert opened[0].meta["files"] == opened[1].meta["files"]
    assert opened[0].meta["pieces"] == opened[1].meta["pieces"]
    losses = []
    for each in opened:
        with Trainer(job, "tp=2", devices="simulated", resume=each.path, listener=QUIET) as trainer:
            losses.append([trainer.step(batch) for batch in trainer.batches()])
    assert losses[0] == losses[1]
