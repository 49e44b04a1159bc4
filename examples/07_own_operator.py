"""An operator of your own, divided over devices: one line says which of its dims may be cut.

    python examples/07_own_operator.py                                        # divides the loss over 2 and 3 devices, and shows how
    meshloom verify examples/07_own_operator.py --plan tp=2 --devices simulated

SwiGLU is written here as an operator of `torch.library`, the way a fused kernel is. Nothing in it says what
its dims mean, so without
a rule every device gathers its inputs and computes all of it. The rule `b* f, b* f -> b* f` says: two tensors
with the same dims, any number of leading ones and features, and a result with them too; a device that has
some of the features of both computes those of
the result. It is written like an einsum; docs/rules.md says how.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml

# --- The operator: forward, shapes, backward.


@torch.library.custom_op("mylib::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; both [..., f]."""
    return F.silu(gate) * up


@swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


def keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = ctx.saved_tensors
    sigmoid = gate.sigmoid()
    return gradient * up * sigmoid * (1 + gate * (1 - sigmoid)), gradient * gate * sigmoid


swiglu.register_autograd(backward, setup_context=keep)

# --- A model that uses it, and a job like any other. It knows nothing of devices.


class FeedForward(nn.Module):
    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, features, bias=False)
        self.up = nn.Linear(width, features, bias=False)
        self.down = nn.Linear(features, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(swiglu(self.gate(y), self.up(y)))


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), FeedForward(32, 96), FeedForward(32, 96), nn.Linear(32, 1))


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(192, 8, generator=generator)
    return TensorDataset(x, x.sin().sum(dim=1, keepdim=True))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def make_job(rules: dict[str, str]) -> ml.Job:
    return ml.Job(
        model=make_model,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        data=make_data,
        batch_size=32,
        steps=6,
        rules=rules,
    )


job = make_job({"mylib::swiglu": "b* f, b* f -> b* f"})


def main() -> None:
    """The losses of some steps on 1, 2 and 3 devices, with the rule and without it."""
    for plan in ("tp=1", "tp=2", "tp=3"):
        for name, each in (("with the rule", job), ("without", make_job({}))):
            with ml.Trainer(each, plan, devices="simulated") as trainer:
                losses = [trainer.step(batch) for batch in trainer.batches()]
            print(f"{plan}  {name:14}" + "".join(f"{value:12.6f}" for value in losses), flush=True)


if __name__ == "__main__":
    main()
