"""offload=optimizer changes where state is, and not one bit of what is computed or saved."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshloom.core.errors import PlanError
from meshloom.core.plan import Plan
from meshloom.optimizer import state_on_disk
from meshloom.optimizer.offload.state_file import StateFile
from meshloom.telemetry.progress import Listener
from meshloom.train.trainer import Trainer
from tests.covering import few
from tests.jobs import make_job
from tests.offload_jobs import Counting, in_file, job_with, offload_job, ran, small, tensor_files
from tests.saving_jobs import names_in

CUTS = "pp=2,microbatches=2"
CASES = [
    ("mlp", "groups", "dp=1"),
    ("mlp", "sgd", "dp=2,zero=1"),
    ("mlp", "muon", "dp=3"),
    ("mlp", "adafactor", "dp=2,zero=2,microbatches=2"),
    ("gpt", "groups", "dp=2,zero=3"),
    ("mlp", "foreach", "dp=3,exchange=server,servers=2"),
    ("mlp", "fused", "dp=2,exchange=local_sgd,local_steps=2"),
    ("mlp", "amsgrad", "dp=2,exchange=diloco,local_steps=2"),
    ("unused_twice", "adagrad", "dp=2,zero=1"),
    ("branch", "rmsprop", "dp=2,exchange=ring"),
    ("mlp", "groups", "tp=2"),
    ("mlp", "muon", "dp=2,tp=2,zero=1"),
    ("mlp", "adamw", f"{CUTS},schedule=zb-v"),
    ("mlp", "adafactor", f"dp=2,zero=3,{CUTS}"),
    ("gpt", "muon", "dp=2,compress=powersgd:2"),
    ("cnn", "sgd", "dp=2,zero=3,recompute=full"),
]


@pytest.fixture(autouse=True)
def _on_cpus(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--device") != "cpu":
        pytest.skip("it is about ranks on CPUs; benchmarks/gpu has a part for GPUs")


@pytest.mark.long
@pytest.mark.parametrize(("model", "optimizer", "plan"), few(CASES, 3, pytest.mark.slow))
def test_bits_are_those_of_the_plan_without_it(
    model: str, optimizer: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch)
    dtype = torch.float64 if plan.startswith("dp=2") else None
    without = ran(offload_job(model, optimizer), plan, dtype=dtype)
    with_it = ran(offload_job(model, optimizer), f"{plan},offload=optimizer", dtype=dtype)
    assert all(torch.equal(with_it[name], each) for name, each in without.items())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "optimizer", ["sgd", "groups", "adafactor", "muon", "foreach", "fused", "amsgrad", "adagrad", "rmsprop"]
)
@pytest.mark.parametrize(
    "plan", ["dp=1", "dp=3", *(f"dp=2,zero={zero},microbatches=2" for zero in (1, 2, 3)), "tp=2", CUTS]
)
def test_bits_of_every_optimizer_under_every_division(
    plan: str, optimizer: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch)
    without = ran(offload_job("gpt", optimizer), plan, dtype=dtype)
    with_it = ran(offload_job("gpt", optimizer), f"{plan},offload=optimizer", dtype=dtype)
    assert all(torch.equal(with_it[name], each) for name, each in without.items())


@pytest.mark.long
def test_counts_that_belong_to_no_parameter_are_those_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts in groups, attributes and shared state; state in lists, some of it made anew in every step."""
    small(monkeypatch)
    job = job_with("mlp", Counting, steps=4)
    with Trainer(job, "dp=1,offload=optimizer", devices="simulated") as trainer:
        updater = trainer.replicas[0].updater
        trainer.fit()
        (optimizer,) = updater._optimizers
        assert isinstance(optimizer, Counting) and len(updater._offloaded._windows[id(optimizer)]) > 2
        assert (int(optimizer.calls), optimizer.state["all"], optimizer.param_groups[0]["calls"]) == (4, 4, 4)
        assert in_file(updater) == 12
        reserved = updater._offloaded._file.num_bytes
        ours = {name: each.detach().clone() for name, each in trainer.replicas[0].named}
    theirs = ran(job, "dp=1")
    assert all(torch.equal(each, theirs[name]) for name, each in ours.items())
    assert reserved <= 16 * 2**20 + 12 * 4096  # what is made anew takes the place of what it replaces


def test_what_cannot_update_a_few_parameters_is_stepped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that counts steps must count as often as without offloading; it is said what that costs."""
    small(monkeypatch)
    calls: list[int] = []

    def hooked(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        made = torch.optim.SGD(named, lr=0.1, momentum=0.9)
        made.register_step_post_hook(lambda *_: calls.append(1))
        return made

    job = job_with("mlp", hooked, steps=2)
    notes: list[str] = []
    listener = Listener()
    monkeypatch.setattr(listener, "note", notes.append)
    with Trainer(job, "dp=1,offload=optimizer", devices="simulated", listener=listener) as trainer:
        trainer.fit()
        assert in_file(trainer.replicas[0].updater) == 6
    assert len(calls) == 2
    assert any("SGD cannot update a few parameters at a time" in each for each in notes)
    assert any("Optimizer state is in an unlinked file in" in each for each in notes)


@pytest.mark.long
@pytest.mark.covering("dp=2,zero=1", "diloco")
@pytest.mark.parametrize(
    "plan", few(["dp=2,zero=1", "dp=2,zero=3", "tp=2", "dp=2,exchange=diloco,local_steps=2"])
)
def test_checkpoints_have_the_same_bytes_and_each_resumes_the_other(
    plan: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small(monkeypatch)
    job = offload_job("mlp", "groups", steps=2)
    longer = offload_job("mlp", "groups", steps=4)
    offloading_plan = f"{plan},offload=optimizer"
    ran(job, plan, out=tmp_path / "without")
    ran(job, offloading_plan, out=tmp_path / "with")
    without, with_it = tensor_files(tmp_path / "without"), tensor_files(tmp_path / "with")
    assert without == with_it and len(without) > 1
    expected = ran(longer, plan, resume=tmp_path / "without")
    for before, after in (("without", offloading_plan), ("with", plan), ("with", offloading_plan)):
        ours = ran(longer, after, resume=tmp_path / before)
        assert all(torch.equal(ours[name], each) for name, each in expected.items())


@pytest.mark.long
def test_a_save_in_the_background_has_the_same_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small(monkeypatch)
    job = offload_job("mlp", "groups", steps=3, checkpoint="background", checkpoint_every=1)
    ran(job, "dp=2,zero=1", out=tmp_path / "without")
    ran(job, "dp=2,zero=1,offload=optimizer", out=tmp_path / "with")
    assert tensor_files(tmp_path / "without") == tensor_files(tmp_path / "with")


class SparseEmbedding(torch.nn.Module):
    """Tokens [batch, length] -> logits [batch, length, 29]; the embedding's gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(29, 9, sparse=True), torch.nn.Linear(9, 29)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


@pytest.mark.parametrize("plan", few(["dp=1", "dp=2,zero=1"], 0))
def test_several_optimizers_one_with_sparse_gradients(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)

    def build(named: list[tuple[str, torch.nn.Parameter]]) -> list[torch.optim.Optimizer]:
        parameters = dict(named)
        embedding = parameters.pop("embed.weight")
        return [torch.optim.SparseAdam([embedding]), torch.optim.AdamW(parameters.values())]

    job = replace(
        job_with("gpt", build),
        model=SparseEmbedding,
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch["x"]).mT, batch["y"]),
    )
    without, with_it = (ran(job, each) for each in (plan, f"{plan},offload=optimizer"))
    assert all(torch.equal(with_it[name], each) for name, each in without.items())


@pytest.mark.long
def test_restored_state_goes_to_the_file_tensor_by_tensor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small(monkeypatch)
    ran(offload_job("mlp", "groups", steps=2), "dp=1", out=tmp_path)
    resumed = offload_job("mlp", "groups", steps=3)
    with Trainer(resumed, "dp=1,offload=optimizer", devices="simulated", resume=tmp_path) as trainer:
        assert in_file(trainer.replicas[0].updater) == 18  # two averages and a count of six parameters


@pytest.mark.slow
def test_a_process_holds_the_state_of_one_window(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Resident pages of the file, as the kernel counts them, while a window is updated and after a save."""
    width = 256  # a matrix is 64 pages
    monkeypatch.setattr(state_on_disk, "WINDOW_BYTES", 4 * width * width)
    seen: list[int] = []

    class Watched(torch.optim.AdamW):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            super().step()
            seen.append(resident(tmp_path))

    job = replace(
        job_with("mlp", lambda named: Watched(named, lr=0.01), steps=3),
        model=lambda: torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(6))),
        loss=lambda model, batch: model(batch["x"].repeat(1, 37)[:, :width]).square().mean(),
    )
    with Trainer(job, "dp=1,offload=optimizer", devices="simulated", out=tmp_path) as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
            assert resident(tmp_path) == 0
        trainer.save()
        assert resident(tmp_path) == 0
        assert len(seen) >= 18 and 0 < max(seen[-6:]) <= 2 * 4 * width * width
        assert [name for name in names_in(tmp_path) if not name.startswith("step-")] == []


def resident(directory: Path) -> int:
    """Bytes of unlinked files of `directory` that are mapped and resident in this process."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            inside = str(directory) in line and line.endswith("(deleted)")
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_tensors_keep_identity_values_and_strides(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    tensors = [
        torch.randn(33, 7).t(),
        torch.arange(5, dtype=torch.bfloat16),
        torch.randn(3, dtype=torch.complex64),
        torch.tensor([True, False]),
    ]
    values = [each.clone() for each in tensors]
    for each in tensors:
        file.place(each)
    file.give_back(tensors)
    file.ask_for(tensors)
    assert all(file.holds(each) for each in tensors)
    assert all(torch.equal(one, other) for one, other in zip(tensors, values, strict=True))
    assert tensors[0].stride() == (1, 7)
    assert list(tmp_path.iterdir()) == []


def test_what_the_kernel_has_dropped_comes_back_from_the_disk(tmp_path: Path) -> None:
    """As where memory is short: pages are written, taken from the cache, asked for and read again."""
    file = StateFile(tmp_path)
    tensor = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    expected = tensor.clone()
    file.place(tensor)
    for _ in range(3):
        file.give_back([tensor])
        descriptor = file._file.fileno()
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        file.ask_for([tensor])
        assert torch.equal(tensor, expected)
        tensor += 1
        expected += 1


def test_room_that_nothing_refers_to_is_used_again(tmp_path: Path) -> None:
    """A view keeps it, also when the tensor that was placed is gone."""
    file = StateFile(tmp_path)
    tensor = torch.zeros(2000)
    file.place(tensor)
    address, view = tensor.data_ptr(), tensor[3:]
    del tensor
    other = torch.ones(2000)
    file.place(other)
    assert other.data_ptr() != address and not view.any()
    del view
    another = torch.ones(2000)
    file.place(another)
    assert another.data_ptr() == address


def test_finding_out_how_much_state_there_will_be_changes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts that the constructor has made already, too."""
    small(monkeypatch)
    optimizer = torch.optim.Adagrad([torch.nn.Parameter(torch.ones(5, 3))], lr_decay=0.5)
    assert state_on_disk.state_bytes_of(optimizer) == 2 * 4096
    (state,) = optimizer.state.values()
    assert float(state["step"]) == 0 and not state["sum"].any()


def test_memory_that_others_refer_to_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """State that is a view, or of which there is a view, would be torn from the rest."""
    monkeypatch.setattr(state_on_disk, "SMALLEST", 1)
    tensor = torch.zeros(10)
    assert state_on_disk._is_movable(tensor)
    view = tensor.view(2, 5)
    assert not state_on_disk._is_movable(tensor) and not state_on_disk._is_movable(view)
    del view
    assert state_on_disk._is_movable(tensor) and not state_on_disk._is_movable(tensor[2:])


def test_a_disk_without_room_is_one_sentence_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Usage:
        free = 10000

    monkeypatch.setattr("meshloom.optimizer.offload.state_file.shutil.disk_usage", lambda _: Usage)
    small(monkeypatch)
    with pytest.raises(
        PlanError,
        match=r"offload=optimizer needs 24 KiB of disk for the optimizer's state of this rank, and .* has 9.77 KiB for it \(No space",
    ):
        Trainer(make_job("mlp", "sgd"), "dp=2,offload=optimizer", devices="simulated", out=tmp_path)


def test_a_directory_in_memory_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("meshloom.machine.file_system.file_system_of", lambda _: "tmpfs")
    monkeypatch.setattr("meshloom.optimizer.offload.state_file.file_system_of", lambda _: "tmpfs")
    with pytest.raises(PlanError, match=r"is on tmpfs, which is memory. Give --out"):
        Trainer(make_job("mlp", "sgd"), "dp=1,offload=optimizer", devices="simulated", out=tmp_path)


def test_the_file_is_on_a_disk_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the run's directory; else with temporary files; else in /var/tmp."""
    kinds: dict[Path, str] = {}
    monkeypatch.setattr("meshloom.machine.file_system.file_system_of", lambda path: kinds.get(path, "ext4"))
    temporary = Path(tempfile.gettempdir())
    assert state_on_disk.directory_for(tmp_path) == tmp_path
    assert state_on_disk.directory_for(None) == state_on_disk.directory_for(tmp_path / "missing") == temporary
    for remote in ("nfs4", "lustre", "fuse.sshfs"):
        kinds[tmp_path] = remote
        assert state_on_disk.directory_for(tmp_path) == temporary
    kinds[temporary] = "tmpfs"
    assert state_on_disk.directory_for(None) == Path("/var/tmp")
    kinds[Path("/var/tmp")] = "tmpfs"
    assert state_on_disk.directory_for(None) == temporary


def test_state_that_is_smaller_than_a_page_stays_in_memory_and_that_is_said() -> None:
    with Trainer(make_job("mlp", "adamw"), "dp=1,offload=optimizer", devices="simulated") as trainer:
        (note,) = trainer.replicas[0].updater.notes()
        assert note.startswith("Optimizer state stays in memory: none of its tensors has 4 KiB on this rank")


def test_settings_that_contradict_it_are_refused() -> None:
    with pytest.raises(PlanError, match="offload=gradients is not known"):
        Plan.parse("dp=2,offload=gradients")
    with pytest.raises(PlanError, match="with exchange=async servers copy their state in memory"):
        Plan.parse("dp=2,exchange=async,offload=optimizer")
    assert (
        str(Plan.parse("dp=2,exchange=async,staleness=0,offload=optimizer"))
        == "dp=2,offload=optimizer,exchange=server"
    )
    assert Plan.from_json(Plan(offload="optimizer").to_json()) == Plan(offload="optimizer")
