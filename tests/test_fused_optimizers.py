"""Fused and foreach optimizers update what a rank owns in as many calls as on one device, whatever it is sliced into."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from meshloom.core.job import NamedParameters
from meshloom.core.plan import Plan
from meshloom.train.trainer import Trainer
from tests.jobs import make_job

STEPS = 2
# what each kind calls once for all parameters of a group in a step
CALLED = {"fused": "_fused_adamw_", "foreach": "_foreach_addcdiv_"}


def adamw(kind: str, named: NamedParameters) -> torch.optim.Optimizer:
    given: dict[str, Any] = {kind: True}
    return torch.optim.AdamW([each for _, each in named], lr=1e-2, **given)


@pytest.mark.long
@pytest.mark.covering("dp=1", "dp=2,zero=1", "dp=2,zero=3", "tp=2-fused")
@pytest.mark.parametrize("kind", CALLED)
@pytest.mark.parametrize(
    "plan", ["dp=1", "dp=2", "dp=2,zero=1", "dp=2,zero=2,microbatches=2", "dp=2,zero=3", "tp=2"]
)
def test_all_that_a_rank_owns_is_updated_in_one_call(plan: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    original: Any = getattr(torch, CALLED[kind])

    def counted(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(tensors))
        return original(tensors, *args, **kwargs)

    monkeypatch.setattr(torch, CALLED[kind], counted)
    job = replace(
        make_job("gpt", "adamw"), optimizer=lambda named: adamw(kind, named), steps=STEPS, scheduler=None
    )
    parsed = Plan.parse(plan)
    with Trainer(job, parsed, devices="cpu" if parsed.mesh.size == 1 else "simulated") as trainer:
        calls.clear()  # which optimizers update element by element was tried out on small tensors
        trainer.fit()
        owned = [
            sum(slice_.stop > slice_.start for slice_ in replica.exchange.ownership.owned)
            for replica in trainer.replicas
        ]
    assert sorted(calls) == sorted(owned * STEPS)
