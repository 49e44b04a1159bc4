"""What is set aside while a loss is read: the values stay, and so does everything outside of the reading."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal
from torch.nn import functional as F

from meshloom.program.capture.capture import capture_module
from meshloom.program.capture.check import check_against_module
from meshloom.program.trace.export_patches import ctc_loss_without_values, patched_for_export
from tests.program_jobs import Loss

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


def check(model: nn.Module, loss: Any, batches: list[Any]) -> list[str]:
    """Operators of the program, which equals eager; raw export refuses."""
    with pytest.raises(Exception, match=r"data-dependent|_ctc_loss"):
        torch.export.export(Loss(model, loss), (batches[0],), strict=False)
    program = capture_module(model, loss, (batches[0], batches[1]))
    check_against_module(program, model, loss, batches[2:], tolerance=0.0)
    return [node.operator for node in program.nodes]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch):
    """Distributions check their arguments, which torch.compile ends for good."""
    monkeypatch.setattr(Distribution, "_validate_args", True)


@pytest.mark.usefixtures("checked")
def test_distributions_do_not_check_their_arguments():
    def likelihood(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return -Normal(model(batch["x"]), batch["x"].exp()).log_prob(batch["y"]).mean()

    batches = [{"x": torch.randn(4, 3), "y": torch.randn(4, 3)} for _ in range(4)]
    assert "log" in check(nn.Linear(3, 3), likelihood, batches)
    with pytest.raises(ValueError, match="to satisfy the constraint"):  # and they still do outside
        Normal(torch.zeros(1), -torch.ones(1))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "lengths", [lambda each: [each] * 3, lambda each: torch.full((3,), each)], ids=["lists", "tensors"]
)
def test_alignments_are_read(lengths: Any, reduction: str):
    def align(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scores = model(batch["x"]).log_softmax(2).transpose(0, 1)
        return F.ctc_loss(scores, batch["y"], lengths(9), lengths(4), reduction=reduction)

    batches = [{"x": torch.randn(3, 9, 4), "y": torch.randint(1, 5, (3, 4))} for _ in range(4)]
    assert "ctc_loss.Tensor" in check(nn.Linear(4, 5), align, batches)


@pytest.mark.usefixtures("checked")
def test_torch_is_as_it_was_afterwards():
    implementations: Any = torch._subclasses.fake_impls.op_implementations_dict

    def seen() -> list[Any]:
        return [
            torch.autograd.Function.__mro__[1].__dict__.get("apply"),
            Distribution._validate_args,
            dict(implementations),
        ]

    def breaks() -> None:
        with patched_for_export(), ctc_loss_without_values(), ctc_loss_without_values():
            assert all(one != other for one, other in zip(seen(), before, strict=True))
            raise KeyError

    before = seen()
    with pytest.raises(KeyError):
        breaks()
    assert seen() == before
