"""Runs go on from directories of torch.distributed.checkpoint, and torch goes on from what is exported."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.cli.main import main
from meshloom.comm.torch.checkpoint_directory import TorchDirectory
from meshloom.core.errors import CheckpointError
from meshloom.core.job import Job
from meshloom.telemetry.progress import Listener
from meshloom.train.from_torch.torch_checkpoint import TorchCheckpoint
from meshloom.train.trainer import Trainer
from tests.jobs import make_job
from tests.processes import on_ranks
from tests.saving_jobs import names_in

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
PLANS = ["dp=2", "dp=2,zero=3", "tp=2", "pp=2", "dp=3,zero=1", "dp=2,tp=2"]


def grouped(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Weights decay, others do not."""
    decaying = [each for _, each in named if each.ndim > 1]
    others = [each for _, each in named if each.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": decaying, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}], lr=1e-3
    )


def rms(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The same groups, another optimizer."""
    return torch.optim.RMSprop([{"params": group["params"]} for group in grouped(named).param_groups])


def job_of(steps: int = 6, **more: Any) -> Job:
    return replace(
        make_job("mlp", "adamw"), **{"steps": steps, "optimizer": grouped, "scheduler": None, **more}
    )


def train(job: Job, plan: str, out: Path | None, **more: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Weights after the last step, and what was said."""
    notes: list[str] = []
    listener = Listener(started=lambda text: None, note=notes.append)
    with Trainer(job, plan, devices="simulated", out=out, listener=listener, **more) as trainer:
        trainer.fit()
    return (Checkpoint.open(out).weights() if out else {}), notes


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps."""
    out = tmp_path_factory.mktemp("run")
    train(job_of(4), "dp=2", out)
    return out


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of one that was not interrupted."""
    return train(job_of(6), "dp=1", tmp_path_factory.mktemp("longer"))[0]


def export(run: Path, kind: str, out: Path) -> Path:
    assert main(["export", str(run), "--to", kind, "--out", str(out), "--optimizer"]) == 0
    return out


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=1e-4, atol=1e-6)  # float32, another order of sums


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.slow
def test_a_run_goes_on_from_its_own_export(
    plan: str, run: Path, longer: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    there = export(run, "dcp", tmp_path / "dcp")
    found, notes = train(job_of(6), plan, tmp_path / "more", resume=there)
    close(found, longer)
    assert notes[0] == f"Going on from {there}, which meshloom has exported after step 4."


def in_torch(run: Path, directory: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Model and optimizer with torch alone, with what is exported."""
    content = torch.load(export(run, "torch", directory / "both.pt"), weights_only=True)
    job = job_of()
    model = job.model()
    model.load_state_dict(content["model"])
    optimizer = grouped(list(model.named_parameters()))
    optimizer.load_state_dict(content["optimizer"])
    assert content["step"] == 4
    return model, optimizer


@pytest.mark.long
def test_torch_goes_on_on_one_device(run: Path, longer: dict[str, torch.Tensor], tmp_path: Path) -> None:
    model, optimizer = in_torch(run, tmp_path)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.01]
    job = job_of(6)
    with Trainer(
        job, "dp=1", devices="simulated", resume=run, listener=Listener(started=lambda text: None)
    ) as trainer:
        for batch in trainer.batches():
            (chunk,) = batch.chunks
            loss = job.loss(model, chunk.data)
            assert isinstance(loss, torch.Tensor)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trainer.step(batch)
    close({name: each.detach() for name, each in model.state_dict().items()}, longer)


def save_from_one_device(run: Path, directory: Path, **changes: Any) -> Path:
    """As a user's program saves it."""
    model, optimizer = in_torch(run, directory)
    weights, state = get_state_dict(model, optimizer)
    dcp.save(
        {"model": weights, "optimizer": state, **changes}, checkpoint_id=directory / "theirs", no_dist=True
    )
    return directory / "theirs"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.slow
def test_a_run_goes_on_from_a_users_program(
    plan: str, run: Path, longer: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    there = save_from_one_device(run, tmp_path)
    found, notes = train(job_of(6), plan, tmp_path / "more", resume=there)
    close(found, longer)
    assert notes[0] == (
        f"Going on from {there}, of torch.distributed.checkpoint: its optimizer's state counts 4 updates, so this run goes on after step 4, with the data that "
        "this job reads then. Schedulers begin anew."
    )


def save_from_fsdp(full: str, directory: str) -> None:
    """On a rank."""
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2)
    try:
        model = job_of().model()
        mesh = init_device_mesh("cpu", (2,))
        for each in model.children():
            fully_shard(each, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = grouped(list(model.named_parameters()))
        weights, state = torch.load(full, weights_only=True)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=weights,
            optim_state_dict=state,
            options=StateDictOptions(full_state_dict=True),
        )
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=directory)
    finally:
        dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.slow
def test_a_run_goes_on_from_fsdp(run: Path, longer: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Its ranks have saved halves of tensors."""
    torch.save(get_state_dict(*in_torch(run, tmp_path)), tmp_path / "full.pt")
    on_ranks(save_from_fsdp, 2, str(tmp_path / "full.pt"), str(tmp_path / "theirs"))
    assert len(list((tmp_path / "theirs").glob("*.distcp"))) == 2
    there, here = TorchCheckpoint(tmp_path / "theirs"), Checkpoint.open(run)
    for name, each in here.weights().items():
        assert torch.equal(there.weight(name), each), name
    assert sorted(there.keys) == sorted(here.keys())
    for key, shape in there.keys.items():
        count = torch.Size(shape).numel()
        for start, stop in ((0, count), (1, count), (count // 2, count // 2 + 3)):
            stop = min(stop, count)
            assert torch.equal(there.read(key, start, stop), here.read(key, start, stop)), key
    found, _ = train(job_of(6), "dp=2", tmp_path / "more", resume=tmp_path / "theirs")
    close(found, longer)


def test_only_the_parts_that_a_box_meets_are_read(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = TorchDirectory(export(run, "dcp", tmp_path / "dcp"))
    read: list[int] = []
    real = dcp.FileSystemReader.read_data

    def counting(self: Any, plan: Any, planner: Any) -> Any:
        read.append(sum(torch.Size(each.lengths).numel() for each in plan.items))
        return real(self, plan, planner)

    monkeypatch.setattr(dcp.FileSystemReader, "read_data", counting)
    place = next(each for each, tensor in directory.tensors.items() if tensor.ndim == 2)
    rows, columns = directory.tensors[place].shape
    assert directory.read(place, (1, 0), (2, columns)).shape == (2, columns)
    assert read == [2 * columns] and rows > 2


def test_safetensors_have_the_state_beside_the_weights(run: Path, tmp_path: Path) -> None:
    out = export(run, "safetensors", tmp_path / "out")
    assert names_in(out) == ["model.safetensors", "optimizer.json", "optimizer.safetensors"]
    state = load_file(out / "optimizer.safetensors")
    checkpoint = Checkpoint.open(run)
    for name, each in state.items():
        assert torch.equal(each.reshape(-1), checkpoint.read(f"optimizer/{name}", 0, each.numel()))
    assert len(state) == len(checkpoint.keys())


@pytest.mark.long
def test_without_state_it_begins_anew_and_that_is_said(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), "--to", "dcp", "--out", str(tmp_path / "dcp")]) == 0
    _, notes = train(job_of(2), "dp=2", tmp_path / "more", resume=tmp_path / "dcp")
    assert notes[0] == (
        f"Going on from {tmp_path / 'dcp'}, of torch.distributed.checkpoint: nothing in it says how many updates were made, so this run begins with step 1 and "
        "the first data. Schedulers begin anew. It has no optimizer's state, which begins anew."
    )


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (make_job("cnn", "adamw"), r"is of another model: it has no parameter .*, which is .* in this job"),
        (job_of(optimizer=lambda named: torch.optim.AdamW([each for _, each in named])), r"has .* in another group of the optimizer than the job's AdamW"),
        (job_of(optimizer=rms), r"is of another optimizer: the job's RMSprop has a setting momentum, which the groups there lack"),
        (job_of(4), r"The checkpoint is at step 4 and the run has 4 steps, so nothing is left"),
    ],
    ids=["model", "groups", "optimizer", "steps"],
)  # fmt: skip
@pytest.mark.long
def test_what_does_not_fit(job: Job, said: str, run: Path, tmp_path: Path) -> None:
    there = save_from_one_device(run, tmp_path)
    with pytest.raises(CheckpointError, match=said):
        train(job, "dp=2", None, resume=there)


@pytest.mark.long
def test_directories_of_another_layout_and_damaged_ones(run: Path, tmp_path: Path) -> None:
    dcp.save({"net": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(
        CheckpointError, match=r'has no "model" with tensors by name; it has net\. Save \{"model"'
    ):
        train(job_of(), "dp=2", None, resume=tmp_path / "other")
    there = save_from_one_device(run, tmp_path)
    (data,) = there.glob("*.distcp")
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 3])
    with pytest.raises(CheckpointError, match="theirs cannot be read: "):
        train(job_of(), "dp=2", None, resume=there)
    data.unlink()
    with pytest.raises(CheckpointError, match="theirs cannot be read: "):
        train(job_of(), "dp=2", None, resume=there)


class Bad:
    """What a pickle runs."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("it ran",)


def test_nothing_of_a_description_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, content in enumerate(
        (pickle.dumps(Bad()), pickle.dumps(print), b"", b"junk", pickle.dumps([]))
    ):
        there = tmp_path / str(number)
        there.mkdir()
        (there / ".metadata").write_bytes(content)
        with pytest.raises(
            CheckpointError, match="cannot be read as what torch.distributed.checkpoint writes"
        ):
            TorchDirectory(there)
    assert not (tmp_path / "it ran").exists()
