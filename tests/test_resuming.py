"""A resumed run reads its checkpoint's slices where all ranks see it; else rank 0 reads each byte once and
hands one tensor at a time to the others.

Every rank once read all files for itself, each of them twice on the way: eight ranks of a host read a
checkpoint of 10 GB as 160 GB, and held all weights in full while they took their parts of them.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.checksums import joined
from meshloom.checkpoint.format import META, MODEL, Piece, meta_text, read_meta
from meshloom.checkpoint.mapped_tensors import MappedTensors
from meshloom.checkpoint.resuming import Loader, check_together, load_together, open_together
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.errors import CheckpointError
from meshloom.core.job import Job, NamedParameters
from meshloom.parameters.values.initial_values import HeldTensor
from meshloom.parameters.whole_model import WholeModel
from meshloom.telemetry.progress import QUIET
from meshloom.train.trainer import Trainer
from tests.fitted import fitted
from tests.jobs import make_job
from tests.jobs_in_memory import integers, job_of, normal
from tests.saving_jobs import (
    SHAPES,
    save_step,
    state_of,
    weights_of,
    written_across_hosts,
    written_in_parallel,
)


class Reads:
    """Bytes that were read of each safetensors file in this process."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes: Counter[str] = Counter()
        opens = Path.open

        def counting(path: Path, *arguments: Any, **settings: Any) -> Any:
            if path.suffix != ".safetensors" or "r" not in (arguments or ["r"])[0]:
                return opens(path, *arguments, **settings)
            return _Counting(path, self.bytes)

        patch.setattr(Path, "open", counting)


class _Counting(io.FileIO):
    def __init__(self, path: Path, counts: Counter[str]) -> None:
        super().__init__(path)
        self._counts = counts

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer) or 0
        self._counts[Path(str(self.name)).name] += count
        return count

    def read(self, size: int = -1) -> bytes:
        found = super().read(size) or b""
        self._counts[Path(str(self.name)).name] += len(found)
        return found


def header(directory: Path, file: str) -> int:
    """Bytes of a file's header."""
    return 8 + int.from_bytes(next(directory.glob(f"*/{file}")).read_bytes()[:8], "little")


def sizes(directory: Path) -> dict[str, int]:
    """Of the safetensors files of the one checkpoint in a run's directory."""
    return {path.name: path.stat().st_size for path in directory.glob("*/*.safetensors")}


# --- Runs.


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ("dp=2,zero=1", 2),
        ("dp=2", 2),
        ("tp=2", 2),
        ("pp=2", 2),
        ("dp=3,exchange=server,servers=2", 3),
        ("dp=2,exchange=diloco,local_steps=2", 2),
    ],
)
@pytest.mark.slow
def test_a_resumed_run_reads_each_byte_once_and_goes_on_bit_for_bit(
    plan: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # replicas that step by themselves become one where they save
    job = make_job("mlp", "adamw", steps=4, checkpoint_every=2)
    with Trainer(job, plan, devices="simulated", out=tmp_path, listener=QUIET) as trainer:
        last_loss = trainer.fit().last_loss
        expected = [dict(replica.model.state_dict()) for replica in trainer.replicas]
    shutil.rmtree(tmp_path / "step-00000004")
    reads = Reads(monkeypatch)
    with Trainer(job, plan, devices="simulated", resume=tmp_path, listener=QUIET) as trainer:
        for file, size in sizes(tmp_path).items():  # for checksums; slices are mapped, after their header
            assert size <= reads.bytes[file] <= size + 4 * ranks * header(tmp_path, file)
        summary = trainer.fit()
        assert summary.last_loss == last_loss
        assert summary.predicted == summary.counted
        for replica, before in zip(trainer.replicas, expected, strict=True):
            for name, tensor in replica.model.state_dict().items():
                assert tensor.is_meta or torch.equal(tensor, before[name]), name


def test_a_rank_that_does_not_see_the_checkpoint_is_named(tmp_path: Path) -> None:
    save_step(tmp_path, 7)

    def rank(group: Any) -> None:
        opened = open_together(tmp_path, group)
        if group.rank == 1:
            opened = Checkpoint(tmp_path / "elsewhere", opened.meta)
        load_together(opened, [], LOADS_NOTHING, group)

    with pytest.raises(
        CheckpointError, match="Rank 1 does not see the checkpoint .*step-00000007, or sees another"
    ):
        in_turns([partial(rank, group) for group in simulated_groups(3)])


LOADS_NOTHING = Loader(weight=lambda *_: None, state=lambda *_: None, finish=lambda: None)


@pytest.mark.covering("dp=2")
@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "pp=2"])
@pytest.mark.long
def test_what_cannot_be_resumed_is_said_under_every_plan(plan: str, tmp_path: Path) -> None:
    job = make_job("mlp", "adamw", steps=2)
    fitted(job, plan, steps=1, out=tmp_path, listener=QUIET)
    with pytest.raises(CheckpointError, match="is of another model"):
        Trainer(make_job("cnn", "adamw", steps=2), plan, devices="simulated", resume=tmp_path, listener=QUIET)
    with pytest.raises(CheckpointError, match=r"optimizer is AdamW with .* the job's is SGD"):
        Trainer(
            replace(make_job("mlp", "sgd", steps=2), scheduler=job.scheduler),
            plan,
            devices="simulated",
            resume=tmp_path,
            listener=QUIET,
        )
    file = next(tmp_path.glob("*/state-00000*"))
    text = bytearray(file.read_bytes())
    text[-1] ^= 1
    file.write_bytes(text)
    with pytest.raises(
        CheckpointError,
        match=rf"{file} is damaged: it has as many bytes as were written, but not the same ones. There is no other",
    ):
        Trainer(job, plan, devices="simulated", resume=tmp_path, listener=QUIET)


# --- Handing over.


def handed_over(directory: Path, num_ranks: int, keys: list[str]) -> list[dict[str, Tensor]]:
    """What each rank is given."""
    found: list[dict[str, Tensor]] = [{} for _ in range(num_ranks)]

    def rank(number: int, group: Any) -> None:
        opened = open_together(directory, group)
        keep = lambda name, tensor: found[number].update({name: tensor.clone()})  # noqa: E731

        def state(key: str, shape: Any, read: Any) -> None:
            keep(key, read(0, math.prod(shape)).view(tuple(shape)))

        load_together(opened, keys, Loader(weight=keep, state=state, finish=lambda: None), group)

    in_turns([partial(rank, number, group) for number, group in enumerate(simulated_groups(num_ranks))])
    return found


@pytest.mark.parametrize("saved_on", [1, 2, 8])
@pytest.mark.parametrize("writing", [written_across_hosts, written_in_parallel])
def test_every_rank_is_given_whole_tensors(saved_on: int, writing: Any, tmp_path: Path) -> None:
    save_step(tmp_path, 7, num_ranks=saved_on, writing=writing)
    expected = weights_of(7) | state_of(7)
    for found in handed_over(tmp_path, 3, list(state_of(7))):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_what_nobody_wants_is_read_for_its_checksum_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_step(tmp_path, 1, num_ranks=2)
    reads = Reads(monkeypatch)
    assert handed_over(tmp_path, 2, [])[1].keys() == SHAPES.keys()
    assert all(reads.bytes[name] >= size for name, size in sizes(tmp_path).items())
    monkeypatch.undo()
    file = path / "state-00000-of-00001.safetensors"
    text = bytearray(file.read_bytes())
    text[-1] ^= 1
    file.write_bytes(text)
    with pytest.raises(CheckpointError, match=rf"{file} is damaged"):
        handed_over(tmp_path, 2, [])


@pytest.mark.parametrize("file", [MODEL, "state-00000-of-00001.safetensors"])
@pytest.mark.parametrize("where", [0, 3, 9, 20, 60, 90, -1])
@pytest.mark.every
def test_a_changed_byte_anywhere_is_damage(file: str, where: int, tmp_path: Path) -> None:
    """The header's length, its JSON, a name, an offset, an element."""
    path = save_step(tmp_path, 1, num_ranks=2) / file
    text = bytearray(path.read_bytes())
    text[where] ^= 0x13
    path.write_bytes(text)
    with pytest.raises(
        CheckpointError,
        match=rf"{path} is damaged: it has as many bytes as were written, but not the same ones",
    ):
        handed_over(tmp_path, 2, list(state_of(1)))


def test_slices_of_weights_in_several_files_are_given(tmp_path: Path) -> None:
    def writing(weights: Any, pieces: Any) -> Any:
        return written_in_parallel(weights, pieces, file_bytes=50)

    path = save_step(tmp_path, 7, writing=writing)
    assert len(list(path.glob("model-*-of-00002.safetensors"))) == 2
    found = handed_over(tmp_path, 2, list(state_of(7)))[1]
    assert all(torch.equal(found[name], each) for name, each in (weights_of(7) | state_of(7)).items())


def test_only_the_slices_that_are_touched_are_in_memory(tmp_path: Path) -> None:
    """Of a mapped file the kernel counts what was touched, and up to 2 MiB around that."""
    save_file({"w": torch.zeros(4096, 1024)}, tmp_path / "x.safetensors")
    whole = MappedTensors([tmp_path / "x.safetensors"]).tensor("w")
    part = whole[:1024].clone()
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.endswith("x.safetensors"))
    resident = next(int(line.split()[1]) for line in lines[at:] if line.startswith("Rss:"))
    assert 4096 <= resident <= 4096 + 2 * 2048 < 16384 and part.shape == (1024, 1024)


VERSION_1 = (
    Path(__file__).parent / "checkpoints/version_1"
)  # as dp=2,zero=1 wrote it when there was one version


@pytest.mark.covering("dp=2", "pp=2")
@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "tp=2", "pp=2"])
@pytest.mark.long
def test_a_checkpoint_of_an_older_release_is_resumed_under_any_plan(plan: str) -> None:
    job = make_job("mlp", "adamw", steps=4)
    with Trainer(job, "dp=2,zero=1", devices="simulated", listener=QUIET) as trainer:
        losses = [trainer.step(batch) for batch in trainer.batches()]
    assert sorted(path.name for path in VERSION_1.glob("*/*")) == [
        "meta.json", "model.safetensors", "state-00000-of-00002.safetensors", "state-00001-of-00002.safetensors"
    ]  # fmt: skip
    with Trainer(job, plan, devices="simulated", resume=VERSION_1, listener=QUIET) as trainer:
        found = [trainer.step(batch) for batch in trainer.batches()]
    assert found == pytest.approx(losses[2:], rel=1e-5)  # float32; plans add in another order


@pytest.mark.parametrize("refusing", [0, 1, 2])
def test_what_one_rank_refuses_every_rank_raises(refusing: int) -> None:
    said: list[str] = []

    def rank(group: Any) -> None:
        def check() -> None:
            if group.rank == refusing:
                raise CheckpointError("it does not fit")

        try:
            check_together(group, check)
        except CheckpointError as error:
            said.append(str(error))

    in_turns([partial(rank, group) for group in simulated_groups(3)])
    assert said == ["it does not fit"] * 3


def test_pieces_that_overlap_and_elements_that_are_missing(tmp_path: Path) -> None:
    whole = torch.arange(10.0)
    pieces = [
        [Piece("optimizer/x/a", whole[:6], 0, 6, (10,))],
        [Piece("optimizer/x/a", whole[4:], 4, 10, (10,))],
    ]
    save_step(tmp_path / "a", 1, num_ranks=2, pieces=lambda rank: pieces[rank])
    assert all(
        torch.equal(found["optimizer/x/a"], whole)
        for found in handed_over(tmp_path / "a", 2, ["optimizer/x/a"])
    )
    save_step(tmp_path / "b", 1, num_ranks=2, pieces=lambda rank: pieces[0] if rank == 0 else [])
    with pytest.raises(CheckpointError, match="has no elements 6 to 10 of optimizer/x/a"):
        handed_over(tmp_path / "b", 2, ["optimizer/x/a"])


def test_a_file_that_another_program_wrote(tmp_path: Path) -> None:
    """The library puts tensors in another order, and may say something besides."""
    path = save_step(tmp_path, 1, num_ranks=1)
    save_file(weights_of(1), path / MODEL, metadata={"format": "pt"})
    meta = read_meta(path)
    assert meta is not None
    text = (path / MODEL).read_bytes()
    meta["files"][MODEL] = {"bytes": len(text), "crc32": zlib.crc32(text)}
    (path / META).write_text(meta_text(json.loads(json.dumps(meta))))
    assert all(
        torch.equal(each, weights_of(1)[name]) for name, each in handed_over(tmp_path, 2, [])[0].items()
    )


# --- Checksums of parts.


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_of_parts_give_that_of_the_whole(first: bytes, second: bytes) -> None:
    assert joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


class Phases(nn.Module):
    """Two layers of drawn weights, random features that no checkpoint has, and one buffer that it has."""

    features: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(7, 10), nn.Linear(10, 7)
        self.register_buffer("features", torch.randn(7), persistent=False)
        self.register_buffer("scale", torch.rand(7))

    def forward(self, values: Tensor) -> Tensor:
        return self.two((self.one(values) * self.one.weight[:, 0]).tanh()) * self.features + self.scale


def _squares(model: nn.Module, values: Tensor) -> Tensor:
    return model(values).square().mean()


@pytest.mark.parametrize(
    ("plan", "reads"),
    [
        ("tp=2", False),
        ("tp=2", True),
        ("dp=2,zero=3", True),
        ("dp=2,zero=3", False),
        ("pp=2,microbatches=2", False),
    ],
)
@pytest.mark.slow
def test_what_a_checkpoint_gives_is_not_drawn_first(
    plan: str, reads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = dict[str, Tensor]()

    def optimizer(named: NamedParameters) -> torch.optim.Optimizer:
        if reads:  # its values are those of the construction all the same
            starts.update({name: each.detach().clone() for name, each in named})
        return torch.optim.AdamW(named, lr=0.01)

    drawn = list[str]()
    fill = WholeModel.fill

    def counted(self: WholeModel, held: Sequence[HeldTensor]) -> None:
        drawn.extend(each.name for each in held)
        fill(self, held)

    job = Job(
        model=Phases, loss=_squares, optimizer=optimizer, data=lambda: torch.randn(12, 7), batch_size=4, steps=4, checkpoint_every=2
    )  # fmt: skip
    with Trainer(job, plan, devices="simulated", out=tmp_path, listener=QUIET) as trainer:
        expected = trainer.fit().last_loss
    shutil.rmtree(tmp_path / "step-00000004")
    drawn_values = dict(starts)
    monkeypatch.setattr(WholeModel, "fill", counted)
    with Trainer(job, plan, devices="simulated", resume=tmp_path, listener=QUIET) as trainer:
        assert trainer.fit().last_loss == expected
    parameters = {name for name, _ in Phases().named_parameters()}
    assert set(drawn) == {"features", *(parameters if reads else ())}
    assert starts.keys() == (parameters if reads else set())
    assert all(torch.equal(each, drawn_values[name]) for name, each in starts.items())


class Observing(nn.Module):
    """Scales by what it has seen, of which it knows not even the shape at first."""

    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 21), nn.Linear(21, 5)
        self.register_buffer("level", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        now = h.detach().abs().mean(0)
        self.level = now if not self.level.numel() else 0.95 * self.level + 0.05 * now
        return self.b(h / (0.1 + self.level))


@pytest.mark.long
def test_a_buffer_that_gets_its_shape_in_the_first_step_is_resumed(tmp_path: Path):
    """It was saved, and refused as one of another model. With several chunks a step it is refused."""
    job = job_of(
        Observing, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), {"x": normal(1, 7), "y": integers(2, 5)}
    )

    def trained(**arguments: Any) -> dict[str, Tensor]:
        with Trainer(job, "dp=1", devices="simulated", listener=QUIET, **arguments) as trainer:
            trainer.fit()
            return {name: each.clone() for name, each in trainer.replicas[0].model.state_dict().items()}

    whole = trained(steps=4)
    trained(steps=2, out=tmp_path)
    resumed = trained(steps=4, resume=tmp_path)
    assert whole["level"].shape == (21,)
    assert all(torch.equal(resumed[name], each) for name, each in whole.items())


def rated(rate: float) -> Job:
    def optimizer(named: NamedParameters) -> torch.optim.Optimizer:
        return torch.optim.AdamW(named, lr=rate)

    return replace(make_job("mlp", "adamw"), optimizer=optimizer, steps=9)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "tp=2"])
@pytest.mark.slow
def test_other_rates_in_the_job_than_in_the_checkpoint_are_said(plan: str, tmp_path: Path) -> None:
    """They were passed over in silence. A schedule's rates are compared with nothing: the groups are, as the function made them."""
    notes: list[str] = []
    listener = replace(QUIET, note=notes.append)

    def goes_on(rate: float, steps: int) -> list[str]:
        notes.clear()
        resume = tmp_path if steps > 1 else None
        fitted(rated(rate), plan, out=tmp_path, resume=resume, steps=steps, listener=listener)
        return [note for note in notes if "optimizer function" in note]

    assert goes_on(0.01, 1) == goes_on(0.01, 2) == []
    (said,) = goes_on(0.02, 3)
    assert said.startswith(
        "The job's optimizer function gives lr=0.02 to group 0 of AdamW, and gave lr=0.01 where the checkpoint was written"
    )
    assert "and gave lr=0.01" in goes_on(0.02, 4)[0]  # whose rates still go on


def after_one_step(directory: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint, and what its meta file has."""
    fitted(rated(0.01), "dp=2", out=directory, steps=1, listener=QUIET)
    (path,) = directory.glob("step-*")
    meta = read_meta(path)
    assert meta is not None
    return path, meta


def test_a_checkpoint_that_does_not_say_what_the_function_gave_is_resumed_silently(tmp_path: Path) -> None:
    path, meta = after_one_step(tmp_path)
    for saved in meta["values"]["updater"]["optimizers"]:
        assert saved.pop("given")
    (path / META).write_text(meta_text(meta))
    notes: list[str] = []
    with Trainer(
        rated(0.02), "dp=2", devices="simulated", resume=tmp_path, listener=replace(QUIET, note=notes.append)
    ):
        assert not any("optimizer function" in note for note in notes)


def test_what_earlier_versions_kept_of_attributes_is_named(tmp_path: Path) -> None:
    path, meta = after_one_step(tmp_path)
    kept = {"rows": [4, 4], "tensors": {"rnn.hidden": {}}, "numbers": {"calls": 3}, "left_out": {}}
    (path / META).write_text(meta_text({**meta, "values": {**meta["values"], "attributes": kept}}))
    notes: list[str] = []
    listener = replace(QUIET, note=notes.append)
    fitted(rated(0.01), "dp=2", resume=tmp_path, listener=listener)
    assert [each for each in notes if "earlier versions" in each] == [
        "The checkpoint has rnn.hidden, calls of earlier versions, which are not kept any more: they begin as the model is built."
    ]
