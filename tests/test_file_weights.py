"""A job's parameters and buffers start from files under every plan, as by `load_state_dict` on one device."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from meshloom.asynchronous.state.parameters import Parameters
from meshloom.checkpoint.mapped_tensors import MappedTensors
from meshloom.comm.pieces import Pieces
from meshloom.comm.simulated import simulated_groups
from meshloom.core.errors import JobError, WeightsError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import model_seed, seed_everything
from meshloom.parameters.file_weights import FileWeights, build_filled_model, match_weights
from meshloom.parameters.shards import Shards
from meshloom.parameters.weight_differences import converts
from meshloom.replica.replica_state import full_state
from meshloom.telemetry.progress import Listener
from meshloom.train.trainer import Trainer
from tests.jobs import GPT, MLP, make_job
from tests.processes import RankError, on_ranks
from tests.verified import equals_one_device, report_on

COLUMNS = ",tp_placements=blocks.*.qkv:column+blocks.*.up:column"


def other_weights(job: Job, path: Path, *, without: str = "") -> Job:
    """The job, starting from a file of the values of another seed; `without`: a name that the file lacks."""
    seed_everything(1234)
    state = {name: each.clone() for name, each in job.model().state_dict().items() if name != without}
    for each in state.values():
        each += 0.01 if each.is_floating_point() else 3
    save_file(state, path)
    return replace(job, weights=path)


def by_hand(job: Job, renamed: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """The parameters and buffers of one device that loads the job's file."""
    seed_everything(model_seed(job.seed))
    model = job.model()
    stored = load_file(Path(str(job.weights)))
    model.load_state_dict(
        {(renamed or {}).get(name, name): each for name, each in stored.items()}, strict=False
    )
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def at_the_start(job: Job, plan: str, devices: str = "simulated", **settings: Any) -> dict[str, Tensor]:
    with Trainer(
        job, plan, devices=devices, listener=Listener(lambda text: None, note=lambda text: None), **settings
    ) as trainer:
        return {name: each.clone().cpu() for name, each in trainer.together(full_state)[0].items()}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert found[name].dtype == each.dtype and torch.equal(found[name], each), name


# --- Under every plan.


@pytest.mark.parametrize("plan", ["dp=1", "dp=2,zero=1", "dp=2,zero=3", "dp=3,exchange=diloco"])
@pytest.mark.parametrize("model", ["cnn", "gpt", "unused_twice"])
@pytest.mark.long
def test_a_run_of_whole_models_starts_from_the_file(model: str, plan: str, tmp_path: Path) -> None:
    job = other_weights(
        make_job(model, "sgd"), tmp_path / "x.safetensors", without="head.weight" if model == "gpt" else ""
    )
    plan = plan.replace("diloco", "diloco,local_steps=2") if "diloco" in plan else plan
    assert_same(at_the_start(job, plan), by_hand(job))


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("gpt", "tp=2" + COLUMNS),
        ("gpt", "pp=2,microbatches=2"),
        ("cnn", "pp=2,recompute=full"),
        ("unused_twice", "dp=2,pp=2"),
        ("mlp", "dp=2,tp=2,zero=1,tp_placements=first:column"),
        ("gpt", "pp=2,tp=2,microbatches=2" + COLUMNS),
        ("cnn", "dp=2,sync_batch_norm=true"),
    ],
)
@pytest.mark.slow
def test_a_run_of_shards_and_stages_starts_from_the_file(model: str, plan: str, tmp_path: Path) -> None:
    job = other_weights(make_job(model, "sgd"), tmp_path / "x.safetensors", without="embed.weight")
    assert_same(at_the_start(job, plan), by_hand(job))


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "pp=2"])
@pytest.mark.slow
def test_what_files_give_is_not_drawn(plan: str, tmp_path: Path) -> None:
    """The model is built with values where one of its tensors has no counterpart, on the ranks that hold some of it."""
    whole = other_weights(make_job("mlp", "sgd"), tmp_path / "x.safetensors")
    built: list[list[bool]] = []
    for job in (whole, replace(whole, weight_names={"first.weight": None})):
        with Trainer(job, plan, devices="simulated") as trainer:
            built.append([bool(vars(replica.start)["_whole"].digests) for replica in trainer.replicas])
    assert built == [[False, False], [True, False]]


@pytest.mark.parametrize("plan", ["dp=2,microbatches=2", "dp=2,pp=2", "tp=2" + COLUMNS])
@pytest.mark.slow
def test_what_starts_from_a_file_equals_one_device_that_loads_it(plan: str, tmp_path: Path) -> None:
    job = other_weights(make_job("gpt", "adamw"), tmp_path / "x.safetensors", without="head.weight")
    report = equals_one_device(job, plan)
    elsewhere = report_on(make_job("gpt", "adamw"), "dp=1")
    assert elsewhere.steps[0].loss != report.steps[0].loss


def test_servers_and_workers_of_an_asynchronous_run_start_from_the_file(tmp_path: Path) -> None:
    job = other_weights(make_job("unused_twice", "sgd", steps=1), tmp_path / "x.safetensors")
    expected = by_hand(job)
    servers = [
        Parameters(job, number, 2, whole=False, device=torch.device("cpu"), dtype=None, content=None)
        for number in range(2)
    ]
    for server in servers:
        assert_same(
            {name: each.detach().cpu() for name, each in server.model.named_parameters()},
            {name: expected[name] for name, _ in server.model.named_parameters()},
        )
    assert "start from" in servers[0].notes()[0] and not any(
        "start from" in each for each in servers[1].notes()
    )
    with Trainer(
        job,
        "dp=2,exchange=async",
        devices="simulated",
        listener=Listener(lambda text: None, note=lambda text: None),
    ) as trainer:
        trainer.fit()
        assert trainer.asynchronous
        # no gradient reaches it, so servers never send it
        assert torch.equal(
            trainer.asynchronous.model.get_parameter("frozen.weight").cpu(), expected["frozen.weight"]
        )


def _on_a_rank(file: str, plan: str) -> tuple[dict[str, Tensor], list[str], float]:
    read: list[str] = []
    plain = MappedTensors.tensor
    MappedTensors.tensor = lambda self, name: (read.append(name), plain(self, name))[1]  # type: ignore[method-assign]
    try:
        with Trainer(
            make_job("gpt", "sgd", weights=file),
            plan,
            devices="cpu",
            listener=Listener(lambda text: None, note=lambda text: None),
        ) as trainer:
            state = {name: each.clone() for name, each in trainer.together(full_state)[0].items()}
            broadcast = sum(trainer.replicas[0].copied.total(axis) for axis in ("dp", "pp"))
            return state, read, broadcast
    finally:
        MappedTensors.tensor = plain


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["dp=2", "pp=2", "dp=2,zero=3"])
def test_processes_read_what_they_hold_and_broadcast_nothing(plan: str, tmp_path: Path) -> None:
    job = other_weights(make_job("gpt", "sgd"), tmp_path / "x.safetensors", without="head.weight")
    (first, *read), (_, *others_read) = on_ranks(_on_a_rank, 2, str(job.weights), plan)
    assert_same(first, by_hand(job))
    assert read[1] == others_read[1] == 0
    names = [set(read[0]), set(others_read[0])]
    if plan == "pp=2":
        assert names[0] & names[1] == {"embed.weight"}  # tied to the head
        assert "blocks.0.qkv.weight" in names[0] and "blocks.1.down.weight" in names[1]
    assert names[0] | names[1] == load_file(Path(str(job.weights))).keys()


def _with_a_file_of_its_own(directory: str) -> None:
    _on_a_rank(f"{directory}/{os.environ['RANK']}/x.safetensors", "dp=2")


@pytest.mark.processes
def test_hosts_with_different_files_are_told(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        job = other_weights(make_job("gpt", "sgd"), tmp_path / f"{rank}/x.safetensors", without="head.weight")
        if rank:
            state = load_file(Path(str(job.weights)))
            save_file({name: each * 1.5 for name, each in state.items()}, str(job.weights))
    with pytest.raises(
        RankError, match=r"Ranks disagree: file x.safetensors of weights is .* Give every host the same files"
    ):
        on_ranks(_with_a_file_of_its_own, 2, str(tmp_path))


def test_of_a_sharded_tensor_only_its_part_is_read(tmp_path: Path) -> None:
    """16 MiB, of which a rank holds a quarter: hardly more of the file is in the process's memory."""
    save_file({"weight": torch.randn(4096, 1024)}, tmp_path / "x.safetensors")
    files = MappedTensors([tmp_path / "x.safetensors"])
    mapped: list[Tensor] = []
    plain = files.tensor
    files.tensor = lambda name: (mapped.append(plain(name)), mapped[-1])[1]  # type: ignore[method-assign]
    weights = FileWeights(
        path=tmp_path,
        files=files,
        identities=(),
        sources={"weight": ("weight",)},
        notes=(),
    )
    pieces = Pieces((4096, 1024), tuple((((1024 * rank, 1024 * rank + 1024),), None) for rank in range(4)))
    model = nn.Linear(1024, 1024, bias=False)
    weights.fill(model, Shards({"weight": pieces}, simulated_groups(4)[2]))
    assert torch.equal(model.weight, load_file(tmp_path / "x.safetensors")["weight"][2048:3072])
    maps = re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())
    resident = [
        int(found[1])
        for each in maps
        if "x.safetensors" in each and (found := re.search(r"Rss: +(\d+)", each))
    ]
    mapped.clear()
    assert 4096 <= sum(resident) <= 2 * 4096  # KiB; the kernel maps up to 2 MiB at a time


# --- From what.


@pytest.mark.parametrize("layout", ["index", "checkpoint", "run"])
@pytest.mark.long
def test_a_job_starts_from_a_directory_or_a_checkpoint(layout: str, tmp_path: Path) -> None:
    job = other_weights(make_job("mlp", "sgd", steps=1), tmp_path / "x.safetensors")
    if layout == "index":
        stored = load_file(tmp_path / "x.safetensors")
        index = {
            name: f"model-0000{number % 2 + 1}-of-00002.safetensors" for number, name in enumerate(stored)
        }
        for file in set(index.values()):
            save_file({name: each for name, each in stored.items() if index[name] == file}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": index})
        )
        assert_same(at_the_start(replace(job, weights=tmp_path), "dp=2"), by_hand(job))
        return
    with Trainer(
        job,
        "dp=2",
        devices="simulated",
        out=tmp_path / "run",
        listener=Listener(lambda text: None, note=lambda text: None),
    ) as trainer:
        trainer.fit()
        trained = {name: each.clone().cpu() for name, each in trainer.replicas[0].model.named_parameters()}
    where = tmp_path / "run" / ("step-00000001" if layout == "checkpoint" else "")
    assert_same(at_the_start(replace(job, weights=where), "dp=2"), trained)
    equals_one_device(replace(job, weights=where), Plan(dp=2), steps=1, dtype=None)


def test_a_resumed_checkpoint_takes_precedence_and_the_files_need_not_be_there(tmp_path: Path) -> None:
    job = other_weights(make_job("mlp", "sgd", steps=1), tmp_path / "x.safetensors")
    with Trainer(job, "dp=2", devices="simulated", out=tmp_path / "run") as trainer:
        trainer.fit()
        trained = {name: each.clone().cpu() for name, each in trainer.replicas[0].model.named_parameters()}
    (tmp_path / "x.safetensors").unlink()
    assert_same(at_the_start(job, "dp=2", resume=tmp_path / "run", steps=2), trained)


# --- Names and dtypes.


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = MLP()
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) + self.table.sum()


def filled(job: Job) -> dict[str, Tensor]:
    model = build_filled_model(job, torch.device("cpu"), None)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_names_are_mapped_by_a_function_or_a_mapping(tmp_path: Path) -> None:
    job = replace(other_weights(make_job("mlp", "sgd"), tmp_path / "x.safetensors"), model=Inner)
    expected = by_hand(job, {name: f"model.{name}" for name in MLP().state_dict()})
    assert_same(filled(replace(job, weight_names=lambda name: name.removeprefix("model."))), expected)
    assert_same(
        filled(replace(job, weight_names={f"model.{name}": name for name in MLP().state_dict()})), expected
    )


def test_what_has_no_counterpart_keeps_its_value_or_is_not_used(tmp_path: Path) -> None:
    job = make_job("mlp", "sgd")
    stored = {**MLP().state_dict(), "head.weight": torch.zeros(2, 9), "old.weight": torch.zeros(3)}
    del stored["head.bias"]
    save_file(stored, tmp_path / "x.safetensors")
    names = {"head.weight": None, "head.bias": None, "old.weight": None}
    job = replace(job, weights=tmp_path / "x.safetensors", weight_names=names)
    seed_everything(model_seed(job.seed))
    expected = {
        **MLP().state_dict(),
        **{name: stored[name] for name in stored if name.startswith(("first", "second"))},
    }
    assert_same(filled(job), expected)
    weights = match_weights(job, MLP())
    assert weights and weights.notes[1:] == [
        "2 tensors keep the values that the model function gave them (weight_names): first head.weight."
    ]


def test_another_dtype_is_converted_and_told(tmp_path: Path) -> None:
    stored = {name: each.to(torch.bfloat16) for name, each in MLP().state_dict().items()}
    save_file(stored, tmp_path / "x.safetensors")
    job = make_job("mlp", "sgd", weights=tmp_path / "x.safetensors")
    assert_same(filled(job), {name: each.float() for name, each in stored.items()})
    notes: list[str] = []
    with Trainer(job, "dp=2", devices="simulated", listener=Listener(lambda text: None, note=notes.append)):
        pass
    assert notes[:2] == [
        f"Parameters and buffers start from {job.weights}: 6 tensors, 984 B.",
        "6 tensors are converted to the model's dtype: first first.weight from bfloat16 to float32.",
    ]


def test_dtypes_that_hold_all_values_or_round_are_converted() -> None:
    assert (
        converts(torch.int32, torch.int64)
        and converts(torch.uint8, torch.int16)
        and converts(torch.complex128, torch.complex64)
    )
    assert not any(
        converts(*pair)
        for pair in [
            (torch.float32, torch.int64),
            (torch.int64, torch.float32),
            (torch.uint8, torch.int8),
            (torch.bool, torch.uint8),
            (torch.complex64, torch.float32),
        ]
    )


def test_a_tied_tensor_is_under_one_name_or_equal_under_both(tmp_path: Path) -> None:
    job = make_job("gpt", "sgd", weights=tmp_path / "x.safetensors")
    seed_everything(5)
    both = {name: each.clone() for name, each in GPT().state_dict().items()}
    for missing in ("embed.weight", "head.weight", ""):
        save_file({name: each for name, each in both.items() if name != missing}, tmp_path / "x.safetensors")
        assert torch.equal(filled(job)["embed.weight"], both["embed.weight"])
    both["head.weight"][3, 4] += 1
    save_file(both, tmp_path / "x.safetensors")
    with pytest.raises(
        WeightsError,
        match=r"embed.weight and head.weight differ in .* are one tensor of the model, embed.weight",
    ):
        filled(job)
    assert torch.equal(
        filled(replace(job, weight_names={"head.weight": None}))["embed.weight"], both["embed.weight"]
    )


# --- What does not fit.


def refused(job: Job) -> str:
    with pytest.raises(WeightsError) as error:
        match_weights(job, job.model())
    return str(error.value)


def test_all_differences_are_one_error(tmp_path: Path) -> None:
    stored = MLP().state_dict()
    del stored["first.bias"], stored["second.weight"]
    stored |= {f"extra.{number}": torch.ones(number) for number in range(12)}
    stored |= {
        "head.weight": torch.ones(9, 5),
        "head.bias": torch.ones(5, dtype=torch.int32),
        "frist.bias": torch.ones(11),
    }
    save_file(stored, tmp_path / "x.safetensors")
    job = make_job(
        "mlp", "sgd", weights=tmp_path / "x.safetensors", weight_names={"body.weight": "head.weight"}
    )
    lines = refused(job).split("\n")
    assert lines[0] == (
        f"The weights in {tmp_path}/x.safetensors are not those of the model: 2 missing from the files, 13 in the files and not in the model, "
        "1 of another shape, 1 of a dtype that cannot be converted, 1 in weight_names and neither in the model nor in the files."
    )
    assert "  first.bias [11]; nearest: frist.bias" in lines and "  second.weight [9, 11]" in lines
    assert "  extra.3 [3]" in lines and "  and 3 more" in lines
    assert "  head.weight: [9, 5] in the files, [5, 9] in the model" in lines
    assert "  head.bias: int32 in the files, float32 in the model" in lines
    assert "  body.weight" in lines
    assert "Job(weight_names={name in the model: name in the files})" in lines[-1]
    with pytest.raises(WeightsError, match="13 in the files and not in the model"):
        Trainer(job, "dp=2", devices="simulated")


@pytest.mark.parametrize(
    ("model", "stored", "mended"),
    [
        (MLP, Inner, 'lambda name: "model." + name'),
        (Inner, MLP, 'lambda name: name.removeprefix("model.")'),
    ],
)
def test_a_prefix_is_found_and_the_mapping_that_mends_it(
    model: Any, stored: Any, mended: str, tmp_path: Path
) -> None:
    save_file(stored().state_dict(), tmp_path / "x.safetensors")
    job = replace(make_job("mlp", "sgd"), model=model, weights=tmp_path / "x.safetensors")
    lines = refused(job).split("\n")
    assert lines[-1] == f"Job(weight_names={mended}) would find 6 of the 6 missing ones."
    assert any(
        line.endswith("head.bias [5]; nearest: " + ("head.bias" if stored is MLP else "model.head.bias"))
        for line in lines
    )
    assert match_weights(replace(job, weight_names=eval(mended)), model())  # noqa: S307


def test_what_was_tied_where_it_was_saved_is_named(tmp_path: Path) -> None:
    stored = {name: each for name, each in GPT().state_dict().items() if name != "head.weight"}
    save_file(stored, tmp_path / "x.safetensors")

    def untied() -> nn.Module:
        model = GPT()
        model.head.weight = nn.Parameter(torch.ones(29, 15))
        return model

    job = replace(make_job("gpt", "sgd"), model=untied, weights=tmp_path / "x.safetensors")
    assert 'if it is tied there, {"head.weight": "embed.weight"}' in refused(job)
    model = build_filled_model(
        replace(job, weight_names={"head.weight": "embed.weight"}), torch.device("cpu"), None
    )
    assert torch.equal(model.get_parameter("head.weight"), stored["embed.weight"])


def test_a_file_that_changes_before_it_is_read_is_told(tmp_path: Path) -> None:
    job = other_weights(make_job("mlp", "sgd"), tmp_path / "x.safetensors")
    weights = match_weights(job, MLP())
    assert weights
    os.utime(tmp_path / "x.safetensors", ns=(1, 1))
    with pytest.raises(
        WeightsError, match=r"x.safetensors has changed since this run began: it had [\d,]+ bytes"
    ):
        weights.fill(MLP())
    (tmp_path / "x.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"x.safetensors cannot be read any more: No such file"):
        weights.fill(MLP())


def test_a_mapping_to_what_is_no_name_is_told() -> None:
    with pytest.raises(JobError, match=r"must be names by name"):
        make_job("mlp", "sgd", weights="x", weight_names={"a": 3})


def test_a_mapping_that_returns_no_name_is_told(tmp_path: Path) -> None:
    job = replace(
        other_weights(make_job("mlp", "sgd"), tmp_path / "x.safetensors"), weight_names=lambda name: 3
    )  # type: ignore[arg-type,return-value]
    with pytest.raises(JobError, match=r"returned a int for first.weight"):
        match_weights(job, MLP())
