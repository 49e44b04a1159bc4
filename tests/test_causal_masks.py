"""Masks that are made of sizes alone: causal ones, and such as hide nothing, are left to the attention. Llama 3 of 8 billion
parameters made a mask of 32 MiB for every microbatch of two texts of 4,096 tokens, and read it in 32 layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured import check_against_eager
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from meshloom.program.capture.capture import capture
from meshloom.program.capture.shapes import capture_shapes
from meshloom.program.ir.nodes import Node
from meshloom.program.ir.program import Program

pytestmark = [pytest.mark.usefixtures("silent_export")]

HEADS, SIZE, LENGTH = 3, 5, 7
Mask = Callable[[Tensor], Tensor | None]  # of tokens [batch, length]


class Attending(nn.Module):
    """Two layers of attention with one mask. is_counted: the mask is used for something else, too."""

    def __init__(self, mask: Mask, *, is_counted: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, HEADS * SIZE)
        self.projections = nn.ModuleList(nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE) for _ in range(2))
        self.mask, self.is_counted = mask, is_counted

    def forward(self, tokens: Tensor) -> Tensor:
        x, mask = self.embedding(tokens), self.mask(tokens)
        for each in self.projections:
            q, k, v = each(x).unflatten(2, (3 * HEADS, SIZE)).transpose(1, 2).split(HEADS, 1)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        assert not self.is_counted or mask is not None
        return x * mask.sum(-1).squeeze(1)[..., None] if self.is_counted and mask is not None else x


def job_of(mask: Mask, *, is_counted: bool = False, length: int = LENGTH) -> Job:
    return Job(
        model=lambda: Attending(mask, is_counted=is_counted),
        loss=lambda model, batch: model(batch["tokens"]).square().mean(),
        optimizer=lambda named: torch.optim.SGD([each for _, each in named], lr=0.1),
        data=lambda: [0],
        batch_size=2,
        steps=1,
    )


def batches(length: int = LENGTH) -> list[Any]:
    drawn = torch.randint(0, 13, (4, 2, length), generator=torch.Generator().manual_seed(0))
    return [{"tokens": each} for each in drawn]


def causal(tokens: Tensor) -> Tensor:
    """As transformers makes it: of positions, and of the texts that are packed into a row, which is one."""
    places = torch.arange(tokens.shape[1])
    text = (torch.diff(places, prepend=places[:1] - 1) != 1).cumsum(-1).expand(len(tokens), -1)
    return ((places[:, None] >= places) & (text[:, :, None] == text[:, None])).unsqueeze(1)


def added(tokens: Tensor) -> Tensor:
    """What is hidden gets the least number."""
    hidden = torch.full((tokens.shape[1], tokens.shape[1]), torch.finfo(torch.float32).min)
    return hidden.triu(1)[None, None].expand(len(tokens), 1, -1, -1)


def everything(tokens: Tensor) -> Tensor:
    return torch.ones(len(tokens), 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool)


def in_a_window(tokens: Tensor) -> Tensor:
    places = torch.arange(tokens.shape[1])
    return (places[:, None] >= places) & (places[:, None] - places < 5)


def without_itself(tokens: Tensor) -> Tensor:
    """All that is before, and for the first place what is there."""
    places = torch.arange(tokens.shape[1])
    return (places[:, None] > places) | (places[:, None] == 0)


def with_a_slope(tokens: Tensor) -> Tensor:
    places = torch.arange(tokens.shape[1], dtype=torch.float32)
    return torch.where(places[:, None] >= places, places - places[:, None], -torch.inf)


def with_padding(tokens: Tensor) -> Tensor:
    places = torch.arange(tokens.shape[1])
    return ((places[:, None] >= places) & ((tokens != 0)[:, None] | (places == 0))).unsqueeze(1)


def attention_of(program: Program) -> list[Node]:
    return [node for node in program.nodes if node.operator == "scaled_dot_product_attention"]


@pytest.mark.covering("causal-True-7", "added-True-3", "everything-False-5", "<lambda>-False-7")
@pytest.mark.parametrize(
    "length", [LENGTH, HEADS, SIZE]
)  # as many tokens as heads, and as elements of a head
@pytest.mark.parametrize(
    ("mask", "is_causal"), [(causal, True), (added, True), (everything, False), (lambda _: None, False)]
)
@pytest.mark.long
def test_it_is_left_to_the_attention(mask: Mask, is_causal: bool, length: int):
    job, given = job_of(mask), batches(length)
    program = capture(job, (given[0], given[1]))
    attention = attention_of(program)
    assert [node.args[3:] for node in attention if node.args[3:]] == [(None, 0.0, is_causal)] * (
        0 if mask(given[0]["tokens"]) is None else 2
    )
    shapes = {each.shape[-2:] for node in program.nodes for each in node.outputs if len(each.shape) != 3}
    assert (length, length) not in shapes or length in (HEADS, SIZE)
    assert check_against_eager(program, job, given[2:]).error < 1e-6
    assert capture_shapes(job, given[0]).nodes == program.nodes


@pytest.mark.parametrize("mask", [in_a_window, without_itself, with_a_slope, with_padding])
@pytest.mark.long
def test_others_are_masks(mask: Mask):
    job, given = job_of(mask), batches()
    program = capture(job, (given[0], given[1]))
    attention = attention_of(program)
    assert len(attention) == 2 and all(node.args[3] is not None for node in attention)
    check_against_eager(program, job, given[2:])


@pytest.mark.long
def test_a_window_as_long_as_the_text_is_causal():
    job, given = job_of(in_a_window), batches(5)
    program = capture(job, (given[0], given[1]))
    assert [node.args[5] for node in attention_of(program)] == [True] * 2


@pytest.mark.long
def test_what_else_uses_a_mask_has_it():
    job, given = job_of(causal, is_counted=True), batches()
    program = capture(job, (given[0], given[1]))
    assert [node.args[5] for node in attention_of(program)] == [True] * 2
    assert any(each.shape == (2, 1, LENGTH, LENGTH) for node in program.nodes for each in node.outputs)
    check_against_eager(program, job, given[2:])


@pytest.mark.long
def test_a_mask_that_is_too_large_to_be_looked_at_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("meshloom.program.capture.causal_masks.MOST_ELEMENTS", 2 * LENGTH**2 - 1)
    given = batches()
    program = capture(job_of(causal), (given[0], given[1]))
    assert all(len(node.args) == 4 for node in attention_of(program))
