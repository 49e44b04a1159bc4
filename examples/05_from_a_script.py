"""From an ordinary training script to a parallel one: the script as it was, and the lines that change.

    python examples/05_from_a_script.py                             # runs both and compares their losses
    meshloom train examples/05_from_a_script.py --plan dp=2         # the new one, on several devices

The script has a model, data, a loss and an optimizer, as every script does. They stay as they are; the loop
around them (`zero_grad`, `backward`, `step`) becomes a `Job` that says which is which.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

# --- What both have: the model and the data.


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))


def make_data() -> TensorDataset:
    torch.manual_seed(1)
    x = torch.randn(480, 8)
    return TensorDataset(x, x.sin().sum(dim=1, keepdim=True))


# --- Before: the loop of an ordinary script.


def train_on_one_device() -> list[float]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in DataLoader(make_data(), batch_size=32):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# --- After: the same pieces, named.

import meshloom as ml  # noqa: E402


def mean_squared_error(model: nn.Module, batch: list[Tensor]) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


job = ml.Job(
    model=make_model,
    loss=mean_squared_error,
    optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
    data=make_data,
    batch_size=32,
    steps=15,
    shuffle=False,  # as in the script above, so that the losses can be compared
)


def train_in_parallel(plan: str) -> list[float]:
    with ml.Trainer(job, plan, devices="simulated") as trainer:
        return [trainer.step(batch) for batch in trainer.batches()]


def main() -> None:
    before = train_on_one_device()
    plans = ["dp=1", "dp=4", "dp=3,microbatches=2", "dp=4,zero=1"]
    after = [train_in_parallel(plan) for plan in plans]
    print("step" + "script".rjust(12) + "".join(plan.rjust(22) for plan in plans))
    for step, losses in enumerate(zip(before, *after, strict=True)):
        print(f"{step:4}{losses[0]:12.6f}" + "".join(f"{value:22.6f}" for value in losses[1:]))
    for losses in after:
        # float32, sums in another order, 15 steps of AdamW
        torch.testing.assert_close(losses, before, rtol=1e-4, atol=0.0)
    print("\nThe losses are the same up to rounding.")


if __name__ == "__main__":
    main()
