"""Why chunks and the whole batch differ is said of the module where it happens, and not of one that has no
samples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.verify.run import verify
from tests.jobs import Samples, texts, token_loss


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
    report = verify(job, Plan(dp=2), devices="simulated", steps=1, dtype=torch.float64)
    assert report is not None and report.passed and report.whole is not None
    return report.whole.why


@pytest.mark.slow
def test_a_sum_with_its_weight_is_the_same_on_the_whole_batch():
    assert why(False, token_loss) == ""


@pytest.mark.slow
def test_a_mean_over_tokens_is_said_of_the_loss_and_not_of_the_positions():
    assert "token" in (reason := why(False, lambda model, batch: model(batch["x"], batch["y"])))
    assert reason.startswith(
        "samples of a batch interact in the model's own forward, or the loss in it averages"
    )
    outside = why(
        False,
        lambda model, batch: nn.functional.cross_entropy(
            model(batch["x"]).flatten(0, 1), batch["y"].flatten()
        ),
    )
    assert outside.startswith("the loss of a batch is not the mean of its samples' losses")


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
    report = verify(job, Plan(dp=2), devices="simulated", steps=1, dtype=torch.float64)
    assert report is not None and report.passed and report.whole is not None
    assert not report.whole.ran and not report.whole.equal
    assert report.whole.why.startswith(
        "the job's own code fails on it: RuntimeError: The expanded size of the tensor (2)"
    )
