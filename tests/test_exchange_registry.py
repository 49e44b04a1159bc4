"""Every entry of the registry of exchanges opens; one that is added is planned and trained by its entry
alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshloom import Plan, Trainer
from meshloom.comm.simulated import simulated_groups
from meshloom.core.exchanges import COMPRESSIONS, EXCHANGES, ExchangeEntry
from meshloom.exchange.all_reduce import AllReduce
from meshloom.exchange.exchange import Exchange
from meshloom.exchange.local_sgd import within_round
from meshloom.exchange.registry import Setup
from tests.test_local_sgd import even_sgd, trained, whole


def opened(**settings: Any) -> Exchange:
    named = list(nn.Linear(4, 4).named_parameters())
    return Setup(plan=Plan(dp=2, **settings), named=named, group=simulated_groups(2)[0]).open()


def open_in_one_bucket(setup: Setup) -> Exchange:
    """As a file of its own would open an exchange."""
    return AllReduce(setup.dense, setup.group, bucket_bytes=2**30, overlap=False)


@pytest.mark.parametrize("name", [name for name, entry in EXCHANGES.items() if entry.synchronous])
def test_an_entry_opens_what_it_says(name: str) -> None:
    exchange = opened(exchange=name)
    assert exchange.ownership.independent == EXCHANGES[name].independent
    assert within_round(exchange) is None
    assert {each.name for each in exchange.ownership.owned} == {"weight", "bias"}
    for setting in EXCHANGES[name].settings:
        assert setting in Plan.__dataclass_fields__
    if not EXCHANGES[name].no_zero:
        assert opened(exchange=name, zero=1).ownership.owners is not None


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_a_compression_opens(name: str) -> None:
    assert isinstance(opened(compress=name), AllReduce)


@pytest.mark.long
def test_an_exchange_is_added_by_its_entry_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of exchanges were told apart in the plan's checks, in two places of the training step and in the
    planner."""
    assert isinstance(EXCHANGES, dict)
    monkeypatch.setitem(
        EXCHANGES, "one_bucket", ExchangeEntry(factory=f"{__name__}:open_in_one_bucket", sums=True)
    )
    text = "dp=2,exchange=one_bucket"
    assert str(Plan.parse(text)) == text and not Plan.parse(text).exempt
    with Trainer(even_sgd(steps=2), text, devices="simulated", dtype=torch.float64) as trainer:
        summary = trainer.fit()
        assert summary.predicted == summary.counted
        found = whole(trainer)
    expected = trained(even_sgd(steps=2), "dp=2", steps=2)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
