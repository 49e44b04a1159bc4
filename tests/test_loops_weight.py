"""`ml.parallel(weight=...)`: a mean over tokens is one device's, however many of them replicas and microbatches have."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshloom as ml
from meshloom.loops.call_microbatches import microbatches_of
from meshloom.loops.ranks import leave_ranks, ranks
from tests.processes import on_ranks

F64, STEPS = torch.float64, 3
Found = tuple[list[float], dict[str, Tensor]]


class Language(nn.Module):
    """Logits, and the mean over tokens that have a label."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.tokens = nn.Embedding(19, width)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width)) for _ in range(4))
        )
        self.head = nn.Linear(width, 19)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.blocks(self.tokens(tokens)))
        if labels is None:
            return logits
        return F.cross_entropy(logits.transpose(1, 2), labels), logits


def valid(tokens: Tensor, labels: Tensor | None = None) -> Tensor | None:
    return None if labels is None else (labels != -100).sum()


def batches() -> list[tuple[Tensor, Tensor]]:
    """Of 7 rows, from 1 to all 11 of whose tokens have labels; the last one of 2, of which a third replica has none."""
    draws, found = torch.Generator().manual_seed(1), list[tuple[Tensor, Tensor]]()
    for step in range(STEPS):
        tokens = torch.randint(0, 19, (7, 11), generator=draws)
        labels = torch.randint(0, 19, (7, 11), generator=draws)
        labels[torch.arange(11) >= torch.tensor([11, 9, 1, 5, 2, 1, 3])[:, None]] = -100
        rows = 2 if step == STEPS - 1 else 7
        found.append((tokens[:rows], labels[:rows]))
    return found


def trained(plan: str | None = None) -> Found:
    """On this rank: of each step the global batch's loss, and one of an evaluation; the last gradients."""
    torch.manual_seed(0)
    model = ml.parallel(Language().to(F64), plan, weight=valid)
    optimizer, losses, grads = torch.optim.SGD(model.parameters(), lr=0.5), list[float](), dict[str, Tensor]()
    for tokens, labels in batches():
        optimizer.zero_grad()
        loss, _ = model(*ml.share((tokens, labels)))
        loss.backward()
        losses.append(float(ml.mean(loss.detach())))
        optimizer.step()
    with torch.no_grad():
        tokens, labels = ml.share(batches()[0])
        model(tokens)
        losses.append(float(ml.mean(model(tokens, labels=labels)[0])))
    with ml.whole(model):
        grads |= {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    leave_ranks(well=True)
    return losses, grads


def differs(found: Found, expected: Found) -> float:
    """The largest difference of a loss or a gradient."""
    assert found[1].keys() == expected[1].keys()
    of_losses = max(abs(a - b) for a, b in zip(found[0], expected[0], strict=True))
    return max(of_losses, *(float((found[1][name] - each).abs().max()) for name, each in expected[1].items()))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("plan", "size"),
    [
        ("dp=2", 2),
        ("dp=3,zero=3", 3),
        pytest.param("tp=2", 2, marks=pytest.mark.long),
        pytest.param("pp=2,microbatches=3", 2, marks=pytest.mark.slow),
        pytest.param("dp=2,pp=2,microbatches=2", 4, marks=pytest.mark.slow),
    ],
)
def test_a_mean_over_tokens_is_one_device_s(plan: str, size: int) -> None:
    expected = trained()
    for found in on_ranks(trained, size, plan, timeout_seconds=200.0):
        assert differs(found, expected) < 1e-12  # float64; sums over parts have another order


def test_a_number_of_all_is_cut_by_what_microbatches_count() -> None:
    batch = {"x": torch.ones(4, 2), "count": torch.tensor(10.0)}
    said = iter([4.0, 1.0])
    parts, _ = microbatches_of(batch, 2, {"count": "part"}, lambda part: next(said))
    assert [(each.rows, each.share, float(each.batch["count"])) for each in parts] == [
        (2, 0.8, 8),
        (2, 0.2, 2),
    ]


def sentence_of(make: Callable[[], Any]) -> str:
    """Of the refusal."""
    torch.manual_seed(0)
    with pytest.raises(ml.MeshloomError) as refused:
        make()
    return str(refused.value)


def called(weight: Any, **options: Any) -> Any:
    """A call of a new model."""
    tokens, labels = batches()[0]
    return ml.parallel(Language(8).to(F64), weight=weight, **options)(*ml.share((tokens, labels)))


def of_replicas() -> list[str]:
    replica = ranks("dp=2").replica
    found = [
        sentence_of(lambda value=value: called(lambda *_: value if replica else 3))
        for value in (0, -1.0, float("nan"), "many", None)
    ]
    leave_ranks(well=True)
    return found


@pytest.mark.processes
def test_a_replica_that_counts_by_no_number_above_0_is_named() -> None:
    for found in on_ranks(of_replicas, 2):
        assert [each.split(" for ")[0].split()[-1] for each in found] == ["0.0", "-1.0", "nan", "nan", "None"]
        assert all("for replica 1 of 2" in each for each in found)


def of_microbatches() -> tuple[list[str], str]:
    ranks("pp=2,microbatches=2")
    model = ml.parallel(Language(8).to(F64), weight=valid)
    found = [
        sentence_of(lambda: called(lambda tokens, labels: (labels[-1] != -100).sum() - 3)),
        sentence_of(lambda: called(lambda tokens, labels: len(tokens))),
        sentence_of(lambda: called(valid, divide=["blocks"])),
        sentence_of(lambda: ml.train_step(model, batches()[0], lambda model, batch: model(*batch)[0])),
    ]
    with redirect_stderr(StringIO()) as said:
        rows = ml.parallel(nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64)), weight=len)
        rows(torch.ones(4, 4)).sum().backward()
        torch.optim.SGD(rows.parameters(), lr=0.1).step()
    leave_ranks(well=True)
    return found, said.getvalue()


@pytest.mark.processes
def test_a_weight_that_a_pipeline_cannot_use_is_refused_and_one_without_effect_said() -> None:
    (first, said), (second, _) = on_ranks(of_microbatches, 2)
    sentences = (
        r"gives 0.0 for microbatch 1 of 2.*ml.mean\(total, count\)", r"Result 0 .* mean over 2 microbatches .*counts.*microbatches=1",
        "divide=.*Leave one of them out", r"\(sum, count\)",
    )  # fmt: skip
    for found in (first, second):
        for sentence, each in zip(sentences, found, strict=True):
            assert re.search(sentence, each), each
    assert "parallel(weight=...) changes nothing under dp=1,pp=2,microbatches=2" in said
