"""`meshloom describe` and `plan` of a script: what they say of its first backward is what they say of the same training as a Job."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rehearsals import machine

from meshloom.cli.main import main
from meshloom.comm.shm.native_engine import why_not
from meshloom.machine.machine import machine_file, save

EXAMPLE = str(Path(__file__).parents[1] / "examples" / "19_own_script.py")
START = """
import sys
import torch
import meshloom as ml
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

class Tagger(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embed, self.norm = nn.Embedding(29, width), nn.LayerNorm(width)
        self.body, self.head = nn.Linear(width, 2 * width), nn.Linear(2 * width, 5)

    def forward(self, tokens, labels=None):
        logits = self.head(F.gelu(self.body(self.norm(self.embed(tokens)))))
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

def sample(number):
    return {"tokens": torch.full((7,), number % 29), "labels": torch.full((7,), number % 5)}

def groups(model):
    decayed = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim == 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.5}]
"""
RETURNED = """
model = ml.parallel(Tagger())
optimizer = torch.optim.AdamW(groups(model), lr=0.1)
print("one epoch")
for batch in ml.loader(DataLoader([sample(each) for each in range(60)], batch_size=12)):
    (model(**batch)["loss"] / 2).backward()
    optimizer.step()
"""
SHARED = """
import argparse
words = argparse.ArgumentParser()
words.add_argument("--width", type=int, required=True)
width = words.parse_args().width

def get_batch():
    batch = [sample(each) for each in range(12)]
    return {name: torch.stack([each[name] for each in batch]) for name in batch[0]}

def train(model, optimizer):
    for _ in range(3):
        batch = ml.share(get_batch())
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch["tokens"], labels=batch["labels"])["loss"]
        loss.backward()
        optimizer.step()

model = ml.parallel(Tagger(width))
train(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
"""
STEPPED = """
def loss_of(model, batch):
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())

model = ml.parallel(Tagger())
optimizer = torch.optim.Adagrad(model.parameters())
for batch in ml.loader(DataLoader([sample(each) for each in range(60)], batch_size=12)):
    with torch.autocast("cpu", torch.bfloat16, enabled="--lower" in sys.argv):
        ml.train_step(model, batch, loss_of)
"""
LOSS_OF = STEPPED[: STEPPED.index("model =")]
MLP = "nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2))"
TWICE = """
model = ml.parallel(MLP)
frozen = ml.parallel(nn.Linear(6, 6))
for x in ml.loader(DataLoader(torch.randn(30, 6), batch_size=10)):
    with torch.no_grad():
        before = model(x)
        y = frozen(x)
    apart = model(x)  # of no backward
    first, second = model(x), model(y)
    (first - second).square().mean().backward()
""".replace("MLP", MLP)
JOB = """
job = ml.Job(
    model=lambda: {model},
    loss={loss},
    optimizer=lambda named: {optimizer},
    data=lambda: [{sample} for each in range(60)],
    batch_size={size}, steps=5,
)
"""
OF_MODULE = "lambda model, batch: model(**batch)['loss']"
HALVES = """
def halves(named):
    some, others = [each for _, each in named if each.ndim > 1], [each for _, each in named if each.ndim == 1]
    return torch.optim.AdamW([{"params": some, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])

def lowered(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return model(**batch)["loss"]

def lowered_step(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, batch)

def both(model, batch):
    return model(batch[0]).mean() + model(batch[1]).mean()
"""
pytestmark = pytest.mark.usefixtures("silent_export", "without_job_files")


def job(
    loss: str,
    optimizer: str,
    *,
    model: str = "Tagger()",
    sample: str = "sample(each)",
    size: int = 12,
    more: str = "",
) -> str:
    text = JOB.format(model=model, loss=loss, optimizer=optimizer, sample=sample, size=size)
    return START + HALVES + more + text


def written(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def records(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[list[dict[str, Any]], str]:
    """Of a command that succeeds, with what it says."""
    assert main([*words[:2], "--json", "-", *words[2:]]) == 0
    captured = capsys.readouterr()
    return [json.loads(each) for each in captured.out.splitlines()], captured.err


SHAPES = {
    "returned": (RETURNED, job(OF_MODULE, "halves(named)"), []),
    "shared": (SHARED, job("lowered", "torch.optim.SGD(named, momentum=0.9)", model="Tagger(16)"), ["--width", "16"]),
    "stepped": (STEPPED, job("loss_of", "torch.optim.Adagrad(named)", more=LOSS_OF), []),
    "stepped in bfloat16": (STEPPED, job("lowered_step", "torch.optim.Adagrad(named)", more=LOSS_OF), ["--lower"]),
    "twice": (TWICE, job("both", "torch.optim.SGD(named)", model=MLP, sample="[torch.ones(6)] * 2", size=10), []),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "options", [[], ["--plan", "dp=2"], ["--plan", "tp=2", "--batch", "6"]], ids=" ".join
)
def test_a_script_is_described_as_the_same_job(
    shape: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    loop, same, words = SHAPES[shape]
    ours, said = records(["describe", written(tmp_path, "train.py", START + loop), *options, "--cache", "off", "--", *words], capsys)  # fmt: skip
    own_copies = ["--transport", "gloo"]
    theirs, _ = records(["describe", written(tmp_path, "job.py", same), *options, *own_copies, "--cache", "off"], capsys)  # fmt: skip
    for kind in ("total", "memory", "ranks", "block"):
        found = [each for each in ours if each["event"] == kind]
        wanted = [each for each in theirs if each["event"] == kind]
        assert found == wanted and (found or kind == "ranks")
    assert ("the mean of its results stands in" in said) == (shape == "twice")
    assert ("not described: Linear (42)" in said) == (shape == "twice")


@pytest.mark.long
@pytest.mark.usefixtures("unmeasured")
def test_the_example_keeps_its_own_output_and_main_module_to_itself(capsys: pytest.CaptureFixture[str]):
    before = sys.modules["__main__"], list(sys.argv)
    found, said = records(["describe", EXAMPLE, "--", "--epochs", "1"], capsys)
    (memory,) = (each for each in found if each["event"] == "memory")
    parameters = 4 * (64 * 128 + 128 + 128 * 10 + 10)
    moments = 2 * parameters + 4 * 4  # and a count of steps for each of four parameters
    assert (memory["parameters"], memory["optimizer"]) == (parameters, moments)
    assert "Sequential, 64 samples, AdamW" in said
    assert (sys.modules["__main__"], sys.argv) == before


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home in which this machine was measured."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = machine_file("cpu")
    transport = "gloo" if why_not() else "shm"
    save(machine(transport=transport, name=path.name.removesuffix("-cpu.json")), path)


@pytest.mark.slow
@pytest.mark.usefixtures("measured")
def test_plans_are_priced_for_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = written(tmp_path, "train.py", START + RETURNED)
    found, said = records(["plan", target, "--ranks", "2", "--devices", "cpu"], capsys)
    plans = {each["plan"] for each in found if each["event"] == "plan"}
    assert {"dp=1", "dp=2", "dp=2,zero=1", "dp=1,tp=2"} <= plans and found[-1]["event"] == "recommended"
    assert "one epoch" in said


@pytest.mark.long
def test_plans_for_a_cluster_are_those_that_loops_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = written(tmp_path, "train.py", START + RETURNED.replace("=12", "=16"))
    found, said = records(["plan", target, "--cluster", "h100-80gb-sxm"], capsys)
    plans = [each["plan"] for each in found if each["event"] == "plan"]
    assert any("zero" in each for each in plans) and any("tp=2" in each for each in plans)
    assert not any("zero=3" in each and ("tp" in each or "pp" in each) for each in plans)
    assert not any("precision" in each or "recompute" in each for each in plans)
    assert "of 1,000 steps" in said


LOSS = '(model(**batch)["loss"] / 2)'
MISTAKES = {
    "not parallel": (RETURNED.replace("ml.parallel(Tagger())", "Tagger()"), [], "goes through no call of a module that ml.parallel() returned"),
    "not called": (RETURNED.replace(LOSS, "model.head.bias.sum()"), [], "goes through no call of a module"),
    "no backward": ("model = ml.parallel(Tagger())\n", [], "ended without a backward"),
    "fails": ("model = ml.parallel(Tagger())\n[][1]\n", [], "failed before its first backward (IndexError: list index out of range)"),
    "no words": (SHARED, [], "left before its first backward (exit code 2). Its own words follow --."),
    "no rows": (RETURNED.replace(LOSS, "ml.parallel(One())()"), [], "No argument of One in the first backward"),
    "of jobs": (RETURNED, ["--plan", "dp=2,recompute=full"], "A loop of one's own takes no recompute=full"),
}  # fmt: skip
ONE = """
class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self):
        return self.weight.sum()
"""


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("verb", ["describe", "plan"])
def test_a_mistake_is_one_sentence(
    verb: str, mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    loop, words, said = MISTAKES[mistake]
    assert main([verb, written(tmp_path, "train.py", START + ONE + loop), *words]) == 2
    captured = capsys.readouterr()
    (line,) = [each for each in captured.err.splitlines() if "Error: " in each and "train.py: error" not in each]  # fmt: skip
    assert said in line and not captured.out


def test_scripts_are_not_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = written(tmp_path, "train.py", START + RETURNED)
    assert main(["plan", target, "--try", "2"]) == 2
    assert "--try trains a job in processes" in capsys.readouterr().err
