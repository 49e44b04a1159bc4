"""Why chunks and the whole batch differ is said of the module where it happens, and not of one that has no
samples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.cli.main import main
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.verify.compared.whole_batch import WholeBatch, compare_whole_batch
from meshloom.verify.reference.reference import Reference
from tests.jobs import Samples, texts, token_loss
from tests.verified import equals_one_device


class Positions(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, 29], or with labels their mean loss; centred: less the
    mean over the batch."""

    def __init__(self, centred: bool = False) -> None:
        super().__init__()
        self.position = nn.Embedding(7, 5)
        self.embed = nn.Embedding(29, 5)
        self.mixed = Centred() if centred else nn.Identity()
        self.head = nn.Linear(5, 29)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        logits = self.head(self.mixed(self.embed(tokens) + self.position(positions)))
        return (
            logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        )


class Centred(nn.Module):
    """[batch, ...] less its mean over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


def why(centred: bool, loss: object) -> str:
    """What is said of the difference, under dp=2 with three samples."""
    job = Job(
        model=lambda: Positions(centred), loss=loss, optimizer=lambda named: torch.optim.SGD(named, lr=0.1), data=texts, batch_size=3, steps=1,
    )  # fmt: skip
    report = equals_one_device(job, Plan(dp=2), steps=1)
    assert report.whole is not None
    return report.whole.why


@pytest.mark.slow
def test_a_sum_with_its_weight_is_the_same_on_the_whole_batch():
    assert why(False, token_loss) == ""


@pytest.mark.slow
def test_a_mean_over_tokens_is_said_of_the_loss_and_not_of_the_positions():
    inside = why(False, lambda model, batch: model(batch["x"], batch["y"]))
    assert inside.startswith(
        "samples of a batch interact in the loss, or it averages over something else than samples"
    )
    outside = why(
        False,
        lambda model, batch: nn.functional.cross_entropy(
            model(batch["x"]).flatten(0, 1), batch["y"].flatten()
        ),
    )
    assert outside.startswith(
        "samples of a batch interact in the loss, or it averages over something else than samples"
    )


@pytest.mark.slow
def test_a_module_that_mixes_samples_is_named():
    assert why(True, token_loss) == "samples of a batch interact in mixed"


class Recent(nn.Module):
    """Linear, and a row for each of the newest samples: at most two at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("rows", torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.rows[: len(x)] = y.detach()
        return y


@pytest.mark.long
def test_a_batch_that_the_model_takes_only_in_chunks_is_no_error_of_the_plan():
    """Two chunks of two samples fit a queue of two rows, four at once do not; verification ended in the
    model's own RuntimeError."""
    job = Job(
        model=Recent, loss=lambda model, batch: model(batch["x"]).square().mean(), optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=lambda: Samples(x=torch.randn(8, 5)), batch_size=4, steps=1,
    )  # fmt: skip
    report = equals_one_device(job, Plan(dp=2), steps=1)
    assert report.whole is not None
    assert not report.whole.ran and not report.whole.equal
    assert report.whole.why.startswith(
        "the job's own code fails on it: RuntimeError: The expanded size of the tensor (2)"
    )


def pairs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Every sample against all of its batch."""
    code = F.normalize(model(batch["x"]), dim=-1)
    return F.cross_entropy(4.0 * code @ code.T, torch.arange(len(code)))


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def over_some(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over elements that chunks have in different numbers."""
    return model(batch["x"])[batch["x"] > -0.2].square().mean()


def net(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), *layers, nn.Linear(7, 5))


def on_whole_batch(model: object, loss: object) -> WholeBatch:
    job = Job(
        model=model, loss=loss, optimizer=lambda named: torch.optim.SGD(named, lr=0.1), data=lambda: Samples(x=torch.randn(12, 5)), batch_size=12, steps=1,
    )  # fmt: skip
    reference = Reference(job, Plan(dp=2, microbatches=2), torch.float64)
    reference.run()
    before = {name: each.clone() for name, each in reference.gradients.items() if each is not None}
    found = compare_whole_batch(reference, 1e-10)
    assert found is not None and found.ran
    assert all(torch.equal(before[name], each) for name, each in reference.gradients.items() if each is not None)  # fmt: skip
    return found


def test_draws_alone_are_no_interaction():
    """Chunks run once more with their rows of the whole batch's draws."""
    found = on_whole_batch(lambda: net(nn.Dropout(0.3)), squares)
    assert not found.equal and not found.interacts and found.why.startswith("random draws")


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_loss_over_pairs_interacts_beside_draws_or_without(dropout: float):
    """The story: InfoNCE was said to average over something else than samples, and with dropout to draw."""
    found = on_whole_batch(lambda: net(nn.Dropout(dropout)), pairs)
    assert found.interacts and found.why.startswith("samples of a batch interact in the loss")
    assert ("random draws" in found.why) == (dropout > 0)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_mean_over_other_numbers_is_a_sum_of_weighted_chunks(dropout: float):
    found = on_whole_batch(lambda: net(nn.Dropout(dropout)), over_some)
    assert found.interacts and "such as tokens: return (sum, weight)" in found.why


def test_batch_statistics_interact():
    found = on_whole_batch(lambda: net(nn.BatchNorm1d(7), nn.Dropout(0.3)), squares)
    assert found.interacts and "batch statistics (1)" in found.why and "random draws" in found.why


JOB = """
import torch
from torch import nn
from torch.nn import functional as F
import meshloom as ml
from tests.jobs import Samples
from tests.test_whole_batch import Recent, pairs, squares

def job_of(model, loss=squares):
    return ml.Job(model=model, loss=loss, optimizer=lambda named: torch.optim.SGD(named, lr=0.1), data=lambda: Samples(x=torch.randn(8, 5)), batch_size=4, steps=1)

draws, interacts, fails = job_of(lambda: nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.3))), job_of(lambda: nn.Linear(5, 3), pairs), job_of(Recent)
"""


@pytest.mark.parametrize(
    ("job", "code", "said"),
    [
        ("draws", 0, "random draws"),
        ("interacts", 1, "samples of a batch interact"),
        ("fails", 2, "fails on it"),
    ],
)
@pytest.mark.long
def test_the_exit_code_judges_the_whole_batch_where_it_is_asked_to(job, code, said, tmp_path, capsys):
    file = tmp_path / "job.py"
    file.write_text(JOB)
    words = ["verify", f"{file}:{job}", "--plan", "dp=2", "--devices", "simulated", "--dtype", "float64", "--quick", "--steps", "1"]  # fmt: skip
    assert main([*words, "--whole-batch"]) == code
    captured = capsys.readouterr()
    first = captured.out.splitlines()[0]
    assert first.startswith("EQUAL to one device that runs the same chunks: 1 step; on the whole batch: ")
    assert said in first and (said in captured.err) == (code > 0)
