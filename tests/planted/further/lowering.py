"""Bugs of precision and of compiled programs."""

from __future__ import annotations

from typing import Any

import torch

from meshloom.comm.simulated import SimulatedGroup
from meshloom.replica.metrics import MetricSums
from tests.planted.areas.evaluation import _around
from tests.planted.bugs import Gradients, Patch, after_finish, bug, on_models, wrap

MIXED = "dp=2,precision=bf16-mixed"


@bug("two-adamw", MIXED, causes="unknown|rounding|stale|loss", module="first")
@bug("long-adamw", MIXED, causes="forward|unknown|rounding|stale|loss", module=None)
def one_replica_computes_without_autocast(patch: Patch) -> None:
    def plain(model: Any, replica: int) -> None:
        if replica == 1:
            right = model.forward

            def forward(x: Any) -> Any:
                with torch.autocast("cpu", enabled=False):
                    return right(x)

            model.forward = forward

    on_models(patch, plain)


@bug("two-sgd", "dp=2,precision=fp16-mixed", causes="scale|unknown", module="first")
def the_scale_of_a_bias_is_divided_out_twice(patch: Patch) -> None:
    def smaller(exchange: Any, found: Gradients, step: int) -> None:
        each = found["first.bias"]
        if each is not None:
            each.div_(65536.0)

    after_finish(patch, smaller)


@bug("two-adamw", MIXED, says="evaluation", causes="rounding|forward|loss|autocast", module="first")
@bug("convolutions-adamw", MIXED, says="evaluation", causes="rounding|forward|loss|autocast", module="conv")
def evaluations_have_no_autocast(patch: Patch) -> None:
    def change(replica: Any) -> Any:
        kept = replica.model.forward

        def forward(x: Any) -> Any:
            with torch.autocast("cpu", enabled=False):
                return kept(x)

        replica.model.forward = forward
        return lambda: delattr(replica.model, "forward")

    _around(patch, change)


@bug("two-adamw", MIXED, causes="loss", says="evaluation", module=None)
@bug("two-adamw", "dp=2,precision=bf16", causes="loss", says="evaluation", module=None)
def metrics_in_low_precision_are_off_by_a_five_hundredth(patch: Patch) -> None:
    def add(right: Any, self: MetricSums, name: str, chunk: Any, returned: Any) -> None:
        right(self, name, chunk, returned.float() * 1.002)

    wrap(patch, MetricSums, "add", add)


@bug("two-adamw", causes="rounding|forward|stale|unknown", module="first")
@bug("texts-adamw", causes="rounding|forward|stale|unknown", module="blocks.0.qkv")
def products_keep_ten_digits(patch: Patch) -> None:
    """As tensor cores do by default on some devices."""

    def truncated(model: Any, replica: int) -> None:
        for each in model.modules():
            if isinstance(each, torch.nn.Linear):
                each.register_forward_pre_hook(lambda module, inputs: (_truncated(inputs[0]),))

    on_models(patch, truncated)


def _truncated(x: torch.Tensor) -> torch.Tensor:
    low = (x.detach().float().contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32).to(x.dtype)
    return x + (low - x).detach()


@bug("two-adamw", "dp=2,bucket_bytes=300", causes="exchanged|stale|unknown|not_reduced", module=None)
def a_sum_is_the_one_before_it(patch: Patch) -> None:
    """Where it has as many elements and there is one."""
    before: dict[int, torch.Tensor] = {}

    def overtaken(right: Any, self: SimulatedGroup, tensor: torch.Tensor, op: Any = "sum") -> Any:
        work = right(self, tensor, op)
        if not tensor.is_floating_point() or tensor.numel() < 20 or self.size != 2:
            return work
        wait, key = work.wait, (self.rank << 20) + tensor.numel()

        def waited() -> None:
            wait()
            now = tensor.clone()
            if key in before:
                tensor.copy_(before[key])
            before[key] = now

        work.wait = waited
        return work

    wrap(patch, SimulatedGroup, "all_reduce", overtaken)
