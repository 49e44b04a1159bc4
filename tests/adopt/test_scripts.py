"""Scripts in the styles of public examples become jobs that take their steps, and these are equal under other plans; what cannot
become one is refused by line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from meshloom.adopt.adoption import Adoption, adopt
from meshloom.core.errors import JobError
from meshloom.core.jobfile import as_program, load_job
from meshloom.core.plan import Plan
from meshloom.telemetry.timings import Timings
from meshloom.verify.run import verify

pytestmark = pytest.mark.on_cpu  # scripts are watched there, and jobs compared
SCRIPTS = Path(__file__).parent / "scripts"
ADOPTED = [
    "averaged_model", "early_stopped", "patient_rate", "quickstart", "several_files/train", "trainer_helper", "trainer_object",
    "weighted_sampler", "zipped",
]  # fmt: skip
LINEAR = """import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(64, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for a, b in loader:
    loss = torch.nn.functional.mse_loss(model(a), b)
"""  # what a loop begins with
QUICK = [
    "averaged_model",
    "early_stopped",
    "several_files/train",
    "trainer_helper",
    "trainer_object",
    "weighted_sampler",
]
# of jobs: metrics, steps between evaluations, best, patience, decay of the average
EVALUATIONS = {
    "averaged_model": (["loss", "acc"], 10, "acc:max", None, 0.98),
    "early_stopped": (["val_loss"], 22, "val_loss:min", 4, None),
    "patient_rate": (["val_loss", "accuracy"], 16, "val_loss:min", None, None),
    "quickstart": (["correct"], 20, None, None, None),
    "trainer_object": (["acc"], 22, "acc:max", None, None),
    "zipped": (["correct"], 5, None, None, None),
}
# lines of evaluations that are named, and why
NAMED = {
    "several_files/train": "engine.py:28: this evaluation is left out: it is added up in an expression",
}
PLANS = ["dp=2", "tp=2", "pp=2,microbatches=2"]
REFUSED = {
    "dcgan": "dcgan.py:23: 2 optimizers take steps",
    "plateau": "plateau.py:21: scheduler.step(...) takes a measured value, which is no metric of an evaluation",
    "reinforce": "reinforce.py:21: no batch was seen",
    "time_sequence": "time_sequence.py:20: the optimizer evaluates the loss itself",
    "tagger": "tagger.py:56: the loop takes one sample a step",
    "trainer_configures": "trainer_configures.py:11: the job needs what this line does with the Trainer itself",
    "two_in_one": "two_in_one.py:17: one statement makes the optimizer and something else",
    "updates_by_hand": "updates_by_hand.py:11: no optimizer takes a step",
    "word_language_model": "word_language_model.py:43: 'hidden' goes from one batch to the next",
    "wrapped_loader": "wrapped_loader.py:28: the loop is over a WrappedDataLoader",
    "zipped": "zipped.py:17: the loop takes a batch of each of several DataLoaders (zip)",
}


def adopted(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Adoption:
    script = SCRIPTS / f"{name}.py"
    monkeypatch.chdir(folder)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread of its own
    monkeypatch.setenv("PYTHONHASHSEED", "42")  # one script sets it
    monkeypatch.syspath_prepend(str(script.parent))
    return adopt(script, target=folder / "adopted_job.py")


def some(names: list[str], quick: list[str]) -> list[object]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", some(ADOPTED, QUICK))
@pytest.mark.long
def test_the_job_takes_the_steps_of_the_script(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = adopted(name, tmp_path, monkeypatch)
    assert not found.refusals
    assert found.proof is not None and found.proof.holds, found.proof and found.proof.told()
    assert len(found.proof.losses) == 4
    shown = "\n".join(found.difference())
    assert "+" in shown and "# line " in shown
    for line, _ in found.reasons:
        assert line >= 1
    with as_program(str(found.target), ()):
        job = load_job(str(found.target))
    assert job is not None
    evaluate = job.evaluate
    told = (list(evaluate.metrics), evaluate.every, evaluate.best, evaluate.patience) if evaluate else ([], 0, None, None)  # fmt: skip
    assert (*told, job.average) == EVALUATIONS.get(name, ([], 0, None, None, None))
    assert [each.name for each in found.proof.metrics] == told[0]
    assert (found.proof.average is not None) == (job.average is not None)
    assert NAMED.get(name, "") in "\n".join(map(str, found.left_out))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ADOPTED[:3])
@pytest.mark.slow
def test_adopted_jobs_are_equal_under_other_plans(
    name: str, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = adopted(name, tmp_path, monkeypatch)
    with as_program(str(found.target), ()):
        job = load_job(str(found.target))
    assert job is not None
    report = verify(job, Plan.parse(plan), devices="simulated", steps=2)
    assert report is not None and report.passed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("stepped", "written"),
    [
        ("accuracy", 'ml.ByMetric(scheduler, "accuracy", lambda value: 100.0 * value)'),
        ("val_loss", 'ml.ByMetric(scheduler, "val_loss")'),
        ("2 * val_loss", 'ml.ByMetric(scheduler, "val_loss", lambda value: 2 * value)'),
        ("val_loss + accuracy", None),
        ("abs(val_loss)", None),
    ],
)
def test_a_threshold_of_its_own_is_of_what_the_script_steps_with(
    stepped: str, written: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "rate.py"
    text = (SCRIPTS / "patient_rate.py").read_text(encoding="utf-8")
    text = text.replace("min_lr=1e-5)", 'min_lr=1e-5, threshold=0.01, threshold_mode="abs")')
    script.write_text(
        text.replace("scheduler.step(val_loss)", f"scheduler.step({stepped})"), encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = adopt(script)
    assert (written is None) == bool(found.refusals)
    assert found.proved if written else "scheduler" in str(found.refusals[0])
    assert (written or "") in found.after


@pytest.mark.parametrize("name", sorted(REFUSED))
@pytest.mark.long
def test_what_cannot_become_a_job_is_refused_by_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = adopted(f"refused/{name}", tmp_path, monkeypatch)
    assert next(str(each) for each in found.refusals).startswith(REFUSED[name])
    assert not found.target.exists()


def test_a_file_that_can_have_no_place_is_refused_before_the_script_runs(tmp_path: Path) -> None:
    script = tmp_path / "never.py"
    script.write_text("raise SystemExit('it ran')\n")
    with pytest.raises(
        JobError, match=r"nowhere/job.py cannot be written: there is no directory .*nowhere. Give --to"
    ):
        adopt(script, target=tmp_path / "nowhere/job.py")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_gradients_that_are_never_zero_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is a mistake, mostly, and why the job differs."""
    script = tmp_path / "adding_up.py"
    script.write_text(LINEAR + "    loss.backward()\n    optimizer.step()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = adopt(script)
    assert not found.proved
    assert any("adding_up.py:10: nothing sets gradients to zero" in str(each) for each in found.left_out)


def test_a_job_does_not_replace_its_script(tmp_path: Path) -> None:
    (script := tmp_path / "kept.py").write_text("raise SystemExit('it ran')\n")
    with pytest.raises(JobError, match=r"would replace the script, .*kept.py. Give another file as --to"):
        adopt(script, target=tmp_path / "." / "kept.py", overwrite=True)


def test_a_file_that_is_no_text_is_said(tmp_path: Path) -> None:
    (script := tmp_path / "binary.py").write_bytes(b"x = 1\n\xff")
    with pytest.raises(JobError, match=r"binary.py is no text in UTF-8: byte 6 is 0xff"):
        adopt(script)


@pytest.mark.filterwarnings("ignore")
def test_several_statements_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which one calls `backward()`, and others make what the job needs or has no use for."""
    script = tmp_path / "short.py"
    script.write_text(
        "import torch; from torch import nn\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "torch.manual_seed(0); rate = 0.1; shown = []\n"
        "# data of a line\n"
        "x = torch.randn(64, 4); y = x.sum(1, keepdim=True)\n"
        "loader, best = DataLoader(TensorDataset(x, y), batch_size=8), 1e9\n"
        "model = nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), lr=rate)\n"
        "for a, b in loader:\n"
        "    loss = nn.functional.mse_loss(model(a), b); shown.append(loss.item())\n"
        "    optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    timings, told = Timings(), list[tuple[int, int] | str | None]()
    timings.entered = told.append
    timings.counted = lambda done, of: told.append((done, of))
    found = adopt(script, timings=timings)
    assert told[:5] == ["running the script", *((done, 4) for done in range(1, 5))]
    assert [each for each in told[5:] if each] == ["writing the job", "comparing the job with the script"]
    assert found.proved
    assert "rate = 0.1" in found.after and "best" not in found.after and "shown" not in found.after
    assert found.after.count("# data of a line") == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.long
def test_script_and_job_are_compared_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that takes a GPU where there is one would draw and round differently; and its tensors would lie elsewhere."""
    for module in (torch.cuda, torch.accelerator):
        monkeypatch.setattr(module, "is_available", lambda: True)
    devices = [
        'torch.device("cuda" if torch.cuda.is_available() else "cpu")',
        'torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"',
    ]
    for number, device in enumerate(devices):
        script = tmp_path / f"where_{number}.py"
        text = LINEAR.replace(
            "torch.nn.Linear(4, 1)",
            "torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Dropout()).to(device)",
        )
        script.write_text(
            text.replace("torch.manual_seed(0)", f"torch.manual_seed(0)\ndevice = {device}").replace("(a), b)", "(a.to(device)), b.to(device))")
            + "    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()\n"
        )  # fmt: skip
        found = adopt(script)
        assert found.proved, found.proof and found.proof.told()
        assert torch.cuda.is_available()


def test_a_job_that_differs_is_not_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that changes parameters by hand behind the optimizer's back."""
    script = tmp_path / "clamped.py"
    script.write_text(
        LINEAR + "    optimizer.zero_grad()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    model.weight.data.clamp_(-0.3, 0.3)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = adopt(script)
    assert not found.proved
    assert found.after.startswith("# NOT PROVED")
    assert any("clamped.py:13" in str(each) for each in found.left_out)
    assert "clamped" not in sys.modules
