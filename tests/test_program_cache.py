"""A reading of an earlier run is used where the job is the same in all that reading depends on; whatever
differs, it is read anew, and says what."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.cli.main import main
from meshloom.core.cache import Cache
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.sizes import any_size as rules
from meshloom.program.store import checked_capture as module
from meshloom.program.store import program_cache as cache_module
from meshloom.program.store.capture_key import capture_key, versions
from meshloom.program.store.captured_loss import CapturedLoss
from meshloom.program.store.object_text import NoTextError
from meshloom.program.store.program_cache import ProgramCache
from meshloom.telemetry.timings import Timings
from meshloom.train.trainer import Trainer
from meshloom.verify.findings import Report
from tests.fitted import fitted
from tests.verified import equals_one_device

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export", "without_job_files")]

WIDTH = 6


WEIGHTS = {"main": [1.0] * 100}  # more than are compared in every step


class Block(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), scale
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) * self.scale + self.shift


def model() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))


def loss_of(factor: float) -> Any:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"]) * factor * WEIGHTS["main"][99]

    return loss


def other_loss_of(factor: float) -> Any:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (
            F.cross_entropy(model(batch["x"]), batch["y"], label_smoothing=0.1) * factor * WEIGHTS["main"][99]
        )

    loss.__qualname__ = "loss_of.<locals>.loss"
    return loss


def either(one: Any, other: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return one(model, batch) - 2 * other(model, batch)


class Samples:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(number)
        return {"x": torch.randn(WIDTH, generator=drawn), "y": torch.randint(0, 3, (), generator=drawn)}


def job_of(make: Callable[[], nn.Module] = model, loss: Any = None) -> Job:
    return Job(
        model=make, loss=loss or loss_of(1.0), optimizer=lambda named: torch.optim.SGD([each for _, each in named], lr=0.1), data=Samples,
        batch_size=4, steps=2,
    )  # fmt: skip


def batches(samples: int = 4) -> list[Any]:
    return [
        torch.utils.data.default_collate([Samples()[first + each] for each in range(samples)])
        for first in (0, 4)
    ]


class Runs:
    """Readings that keep what they read in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.notes: list[str] = []

    def read(self, job: Job | None = None, given: list[Any] | None = None) -> bool:
        """Whether the loss was captured, and not taken from an earlier run. What it gives is in both cases
        the program that a reading gives."""
        timings, job, given = Timings(), job or job_of(), given or batches()
        program = CapturedLoss(
            job, stored=ProgramCache(Cache(self.directory), timings), timings=timings
        ).capture(given)
        assert program.digest() == CapturedLoss(job).capture(given).digest()
        self.notes = timings.notes
        return "reading" in timings.seconds


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    found = Runs(tmp_path / "kept")
    assert found.read()
    assert found.notes == ["The loss was captured anew: no earlier run has stored it."]
    return found


@pytest.mark.slow
def test_the_same_job_is_read_once_and_another_says_what_differs(runs: Runs):
    assert not runs.read()
    assert runs.notes == ["The captured loss is taken from an earlier run."]
    assert runs.read(job_of(scaled))
    assert runs.notes == ["The loss was captured anew: changed since an earlier run: model."]
    assert not runs.read(job_of(scaled)) and not runs.read()  # both are kept


def key_of(job: Job, samples: int = 4) -> dict[str, str]:
    return capture_key(job, job.model(), leaves_of(batches(samples)[0]), known={})


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name in one if one[name] != other[name]}


def scaled() -> nn.Module:
    made: Any = model()
    made[1].scale = 2.0
    return made


def shifted() -> nn.Module:
    made: Any = model()
    made[0].shift += 1.0
    return made


def frozen() -> nn.Module:
    made: Any = model()
    made[0].linear.weight.requires_grad_(False)
    return made


def tied() -> nn.Module:
    made: Any = model()
    made[1].linear.weight = made[0].linear.weight
    return made


def hooked() -> nn.Module:
    made: Any = model()
    made[1].register_forward_hook(lambda module, inputs, output: output * 3)
    return made


def patched() -> nn.Module:
    """The forward of an installed package's class, replaced on one module."""
    made: Any = model()
    made[2].forward = lambda x: F.linear(x, made[2].weight)
    return made


def wider() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 4))


@dataclass(frozen=True)
class Setting:
    """Of a model, as many write it."""

    scale: float = 1.0
    names: list[str] = field(default_factory=list)


def set_to(setting: Setting) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made: Any = model()
        made[1].setting = setting
        return made

    return make


@pytest.mark.parametrize("make", [scaled, shifted, frozen, tied, hooked, patched, wider, set_to(Setting())])
def test_the_key_of_another_model_is_another(make: Callable[[], nn.Module]):
    assert key_of(job_of(make)) == key_of(job_of(make))
    assert differing(key_of(job_of()), key_of(job_of(make))) - {"what code reads"} == {"model"}


def test_a_key_is_read_by_people():
    key = key_of(job_of(set_to(Setting(names=["x"])), loss_of(0.5)))
    lines = key["model"].splitlines()
    assert "1.scale = 1.0" in lines
    assert f"1.setting = {__name__}:Setting {{'scale': 1.0, 'names': ['x']}}" in lines
    assert any(each.startswith("2.weight: parameter torch.float32 [3, 6]") for each in lines)
    assert "loss_of.<locals>.loss (test_program_cache.py" in key["loss"]
    read = key["what code reads"].splitlines()
    assert any("loss_of.<locals>.loss" in each and each.endswith(" reads factor = 0.5") for each in read)
    assert any(each.endswith(" reads WIDTH = 6") for each in read)  # by the constructor of `Block`


def test_the_key_of_another_loss_is_another(monkeypatch: pytest.MonkeyPatch):
    """Another place, another value in its closure, in a global list that is too long to be compared in every step, and in
    an attribute of a class."""
    before = key_of(job_of())
    assert key_of(job_of()) == before
    assert "loss" in differing(before, key_of(job_of(loss=other_loss_of(1.0))))
    assert differing(before, key_of(job_of(loss=loss_of(2.0)))) == {"what code reads"}
    with monkeypatch.context() as patched:
        patched.setitem(WEIGHTS, "main", [1.0] * 99 + [5.0])
        assert differing(before, key_of(job_of())) == {"what code reads"}
    with monkeypatch.context() as patched:
        patched.setattr(Block, "rate", 2.0, raising=False)
        assert differing(before, key_of(job_of())) == {"what code reads"}
    two = loss_of(2.0), loss_of(3.0)
    both = [key_of(job_of(loss=partial(either, one, other))) for one in two for other in two]
    assert len({each["loss"] + each["what code reads"] for each in both}) == 4
    lambdas = [(lambda model, batch: 1.0), (lambda model, batch: 2.0)]
    assert len({key_of(job_of(loss=each))["loss"] for each in lambdas}) == 2  # of one line


def test_other_versions_settings_arguments_and_shapes_are_in_the_key(monkeypatch: pytest.MonkeyPatch):
    before = key_of(job_of())
    kept = versions()
    with monkeypatch.context() as patched:
        patched.setattr("torch.__version__", "9.9.9")
        assert differing(versions(), kept) == {"torch"}
    torch.use_deterministic_algorithms(True)
    try:
        assert differing(before, key_of(job_of())) == {"settings of torch"}
    finally:
        torch.use_deterministic_algorithms(False)
    assert differing(before, key_of(replace(job_of(), seed=1))) == {"job"}
    assert differing(before, key_of(replace(job_of(), leaves=[Block]))) == {"job"}
    assert differing(before, key_of(job_of(), samples=3)) == {"batch"}


def test_a_file_of_the_users_counts_by_its_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One that was written after this process began may be another than was imported."""
    file = tmp_path / "helpers_of_mine.py"
    file.write_text("RATE = 1\n")
    os.utime(file, (0, 0))
    monkeypatch.syspath_prepend(tmp_path)
    before = key_of(job_of())
    importlib.import_module(file.stem)
    try:
        there = key_of(job_of())
        assert differing(before, there) == {"source files"} and f"{file.stem}: " in there["source files"]
        file.write_text("RATE = 2\n")
        with pytest.raises(NoTextError, match="helpers_of_mine, whose file was changed since"):
            key_of(job_of())
        os.utime(file, (0, 0))
        assert differing(there, key_of(job_of())) == {"source files"}
    finally:
        del sys.modules[file.stem]


def test_what_has_no_text_is_not_stored(runs: Runs):
    """A lock in the model: nobody can tell whether another run's is the same. Code that is in no file."""

    def locked() -> nn.Module:
        made: Any = model()
        made[1].lock = threading.Lock()
        return made

    with pytest.raises(NoTextError, match="the loss, whose code is in no file,"):
        key_of(job_of(loss=eval("lambda model, batch: model(batch['x']).sum()")))  # noqa: S307
    cache, timings = Cache(runs.directory), Timings()
    assert ProgramCache(cache, timings).entry(job_of(), locked(), leaves_of(batches()[0]), kind="") is None
    assert timings.notes == ["The captured loss is not cached: 1.lock, a lock, cannot be written as text."]


@pytest.mark.slow
def test_a_file_that_is_damaged_is_read_anew_with_one_sentence(runs: Runs):
    (path,) = runs.directory.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert runs.read()
    assert len(runs.notes) == 1 and "is not trusted" in runs.notes[0]
    assert not runs.read()


@pytest.mark.slow
def test_a_reading_that_is_not_eagers_is_refused_even_if_its_key_is_equal(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
):
    """The fault is planted in what tells readings apart: it sees no difference. Other numbers show in a
    forward, other parameters before that."""
    monkeypatch.setattr(cache_module, "capture_key", lambda *_, **__: {"nothing": ""})
    assert runs.read()
    assert runs.read(job_of(loss=loss_of(2.0)))
    assert "A cached program is not used: The captured program differs from the model" in runs.notes[0]
    assert runs.read(job_of(wider))
    assert "2.weight has another shape or dtype in the model" in runs.notes[0]


@pytest.mark.slow
def test_a_large_program_is_looked_at_as_small_as_it_was_compared(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
):
    sizes: list[int] = []
    check = module.check_against_module

    def noted(program: Any, model: Any, loss: Any, given: Any) -> Any:
        sizes.extend(len(each["x"]) for each in given)
        return check(program, model, loss, given)

    monkeypatch.setattr(rules, "MIN_ELEMENTS", 0)
    many = [
        {name: each.repeat(40, *[1] * (each.ndim - 1)) for name, each in batch.items()} for batch in batches()
    ]
    assert runs.read(given=many)
    monkeypatch.setattr(module, "check_against_module", noted)
    assert not runs.read(given=many)
    assert sizes[:2] == [32, 32] and len(many[0]["x"]) == 160


@pytest.mark.parametrize(
    "plan", ["tp=2", "pp=2,microbatches=2", "pp=2,tp=2,microbatches=2,recompute=selective"]
)
@pytest.mark.slow
def test_a_second_start_reads_and_chooses_nothing_and_trains_to_the_same_bits(plan: str, tmp_path: Path):
    def train(cache: str | Path) -> tuple[dict[str, Tensor], Timings]:
        timings = Timings()
        with Trainer(job_of(), plan, devices="simulated", cache=cache, timings=timings) as trainer:
            trainer.fit()
            weights = [
                {name: each.clone() for name, each in replica.model.state_dict().items() if not each.is_meta}
                for replica in trainer.replicas
            ]
            return {
                f"{number}.{name}": each
                for number, found in enumerate(weights)
                for name, each in found.items()
            }, timings

    never, _ = train("off")
    first, anew = train(tmp_path / "kept")
    second, taken = train(tmp_path / "kept")
    assert "reading" in anew.seconds and "reading" not in taken.seconds and "prices" not in taken.seconds
    assert taken.notes == ["The captured loss is taken from an earlier run."]
    assert never.keys() == first.keys() == second.keys()
    assert all(
        torch.equal(never[name], first[name]) and torch.equal(never[name], second[name]) for name in never
    )
    kept = {path.name.partition("-")[0] for path in (tmp_path / "kept").iterdir()}
    assert kept == {"reading"} | ({"division"} if "tp" in plan else set()) | (
        {"cut"} if "pp" in plan else set()
    ) | ({"kept"} if "recompute" in plan else set())


@pytest.mark.slow
def test_verification_in_another_precision_reads_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The loss in that precision, and its shapes in the job's own, by which it is divided and cut."""
    counted: list[Any] = []
    export: Any = torch.export.export

    def counting(*given: Any, **more: Any) -> Any:
        counted.append(given)
        return export(*given, **more)

    monkeypatch.setattr(torch.export, "export", counting)

    def verified() -> tuple[Report, int]:
        counted.clear()
        report = equals_one_device(job_of(), Plan(pp=2, tp=2), quick=False, cache=str(tmp_path), steps=3)
        return report, len(counted)

    (first, exported), (second, again) = verified(), verified()
    assert exported and not again
    assert first.digest == second.digest
    assert len(list(tmp_path.glob("reading-*"))) == 2


def normed() -> nn.Module:
    return nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))


@pytest.mark.slow
def test_batch_norm_is_kept_and_a_plan_that_synchronises_it_reads_nothing(tmp_path: Path):
    """Synchronised layers have forwards with groups in them, which have no digest; such plans run modules,
    and come to no reading."""
    told: list[list[str]] = []
    for plan in ("dp=2,sync_batch_norm=true", "dp=2,pp=2", "dp=2,pp=2"):
        timings = Timings()
        fitted(replace(job_of(normed), steps=1), plan, cache=tmp_path, timings=timings)
        told.append(timings.notes)
    assert told == [
        [],
        ["The loss was captured anew: no earlier run has stored it."],
        ["The captured loss is taken from an earlier run."],
    ]


@pytest.mark.slow
def test_another_plan_takes_the_reading_and_chooses_for_itself(tmp_path: Path):
    for plan, divisions in (("tp=2", 1), ("tp=4", 2), ("tp=2,tp_placements=0.linear:replicated", 3)):
        timings = Timings()
        fitted(replace(job_of(), steps=1), plan, cache=tmp_path, timings=timings)
        assert len(list(tmp_path.glob("division-*"))) == divisions
    assert "reading" not in timings.seconds


@pytest.mark.slow
def test_a_second_description_reads_and_chooses_nothing_and_says_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def described() -> tuple[list[Any], dict[str, float]]:
        words = ["--plan", "tp=2,pp=2,microbatches=2", "--cache", str(tmp_path), "--timings", "--json", "-"]
        assert main(["describe", str(Path(__file__).with_name("describe_jobs.py")), *words]) == 0
        captured = capsys.readouterr()
        records = [json.loads(line) for line in captured.out.splitlines()]
        assert ("The captured loss is taken from an earlier run." in captured.err) == (len(seen) == 1)
        seen.append(captured.err)
        return records[:-1], records[-1]["seconds"]

    seen: list[str] = []
    first, anew = described()
    kept = [
        "planner.divided.layout_of",
        "planner.divided.partition",
        "planner.divided.account_of",
        "planner.ranks.rank_shares",
        "planner.readings.costs",
        "planner.readings.comparison_bytes",
    ]
    kept += [
        "program.capture.shapes.export_once",
        "planner.divided.choose",
        "planner.staged_plan.choose_stages",
        "planner.describe.predict_memory",
    ]
    with monkeypatch.context() as patched:
        for name in kept:
            patched.setattr(f"meshloom.{name}", pytest.fail)
        second, taken = described()
    assert taken.keys() == anew.keys() - {"axes", "dividing"}
    events = [record["event"] for record in first]
    assert first == second and {"division", "stages", "ranks"} <= set(events)
    kinds = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert kinds == {
        "reading",
        "division",
        "cut",
        "costs",
        "memory",
        "account",
        "ranks",
        "facts",
        "comparison",
    }
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    third, _ = described()
    assert third == first
    assert all(
        f"A cached result ({kind}) is not used" in seen[-1] for kind in kinds - {"reading", "division"}
    )


KEYS_OF_FAMILIES = """
import json
from torch.utils.data import default_collate
from meshloom.program.store.capture_key import capture_key
from meshloom.program.ir.leaves import leaves_of
from tests.families import FAMILIES

for name in ("gpt2", "llama", "t5"):
    job = FAMILIES[name].make_job(True)
    data, collate = job.data(), job.collate or default_collate
    print(json.dumps(capture_key(job, job.model(), leaves_of(collate([data[0], data[1]])), values=False)))
"""


@pytest.mark.slow
def test_keys_are_the_same_in_every_process():
    """Python draws the hashes of texts anew in every process, and with them the order of sets and numbers
    that classes keep as their hashes."""
    found = [
        subprocess.run(
            [sys.executable, "-c", KEYS_OF_FAMILIES], env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1])},
            check=True, capture_output=True, text=True,
        ).stdout.splitlines()
        for seed in ("1", "2")
    ]  # fmt: skip
    assert len(found[0]) == 3 and found[0] == found[1]


JOB = """
import torch
import meshloom as ml
from helper import scale

def data():
    return [{"x": torch.ones(3)} for _ in range(8)]

def sgd(named):
    return torch.optim.SGD([each for _, each in named], lr=0.1)

job = ml.Job(model=lambda: torch.nn.Linear(3, 2), loss=lambda model, batch: scale(model(batch["x"])).square().mean(), optimizer=sgd, data=data, batch_size=4, steps=1)
"""


@pytest.mark.slow
def test_a_new_process_takes_the_program_until_a_helper_changes(tmp_path: Path):
    (tmp_path / "job.py").write_text(JOB)

    def notes(factor: int) -> str:
        (tmp_path / "helper.py").write_text(f"def scale(x):\n    return x * {factor}\n")
        words = [
            "train",
            "job.py",
            "--plan",
            "tp=2",
            "--devices",
            "simulated",
            "--timings",
            "--cache",
            "kept",
        ]
        ran = subprocess.run(
            [sys.executable, "-m", "meshloom", *words], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        return ran.stdout + ran.stderr

    assert "no earlier run has stored it" in notes(2)
    assert "The captured loss is taken from an earlier run." in notes(2)
    assert "changed since an earlier run: source files." in notes(3)
    (kept, *_) = (tmp_path / "kept").glob("reading-*")
    assert b"helper: " in kept.read_bytes() and b'"default dtype: torch.float32"' in kept.read_bytes()
