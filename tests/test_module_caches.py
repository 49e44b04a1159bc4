"""Tables that a model's Python module keeps from call to call: under functools.cache, in a dictionary, of the constructor."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.job import Job
from meshloom.core.modules.module_caches import no_tensors_kept
from tests.jobs_in_memory import integers, job_of, sgd
from tests.verified import equals_one_device

WAVES: dict[int, Tensor] = {}
TABLES: dict[str, tuple[list[dict[int, Tensor]], int]] = {}


@functools.lru_cache(maxsize=8)
def causal(n: int) -> Tensor:
    """[n, n]"""
    return torch.triu(torch.full((n, n), float("-inf")), 1)


@functools.cache
def halves(n: int) -> int:
    return n // 2


class Attending(nn.Module):
    """ids [n, t] -> [n, t, 31]"""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv, self.out = nn.Embedding(31, 8), nn.Linear(8, 24), nn.Linear(8, 31)
        with torch.no_grad():
            self.embedding.weight += causal(8).exp()[0]

    @functools.lru_cache  # noqa: B019
    def slopes(self, n: int) -> Tensor:
        return torch.linspace(0, 1, n, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        if n not in WAVES:
            WAVES[n] = torch.cos(torch.arange(n, dtype=torch.float64) / 3)
        h = self.embedding(ids) * WAVES[n].to(self.out.weight)[:, None]
        q, k, v = self.qkv(h).chunk(3, -1)
        weights = (q @ k.mT / 8**0.5 + causal(n).to(h)).softmax(-1)
        return self.out(h + weights @ v * self.slopes(n).to(h)[:, None])


def next_ids(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def attending() -> Job:
    return job_of(Attending, next_ids, list(integers(5, 31, 7)), optimizer=sgd)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "pp=2,microbatches=2"])
@pytest.mark.usefixtures("silent_export", "dear_memory")
@pytest.mark.slow
def test_a_job_equals_one_device(plan: str, capsys: pytest.CaptureFixture[str]):
    """A trace's tensors stayed in the caches, and the next forward failed on them."""
    causal.cache_clear()
    WAVES.clear()
    equals_one_device(attending(), plan, steps=3)
    assert "as written" not in capsys.readouterr().err  # all of it is read


def test_what_was_kept_before_stays():
    causal.cache_clear()
    WAVES.clear()
    WAVES[3] = torch.zeros(3)
    halves(8)
    with no_tensors_kept():
        WAVES[4] = torch.zeros(4)
        causal(5)
        halves(9)
    assert list(WAVES) == [3]
    assert causal.cache_info().currsize == 0
    assert halves.cache_info().currsize == 2  # of numbers
    WAVES.clear()


def test_tensors_are_found_in_containers_of_containers():
    TABLES["kept"] = [{3: torch.zeros(3)}], 7
    with no_tensors_kept():
        TABLES["new"] = [{4: torch.zeros(4)}], 7
    assert list(TABLES) == ["kept"]
    with no_tensors_kept():
        TABLES["of numbers"] = [], 7
    assert list(TABLES) == ["kept", "of numbers"]
    TABLES.clear()
