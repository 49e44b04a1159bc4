"""A training loop of one's own: `batches()` gives this process its share of the data, `step` returns the
global mean loss.

    python examples/04_own_loop.py                                      # four replicas simulated in this process
    torchrun --nproc-per-node 4 examples/04_own_loop.py                 # four processes

The loop stops when the loss on held-out samples has stopped falling. Every process takes the same decisions,
because `step` and `evaluate` return the same number on all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml


def spirals(num_samples: int, seed: int) -> TensorDataset:
    """Points [2] on one of three spirals, and which one it is."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(3, (num_samples,), generator=generator)
    radius = torch.rand(num_samples, generator=generator)
    angle = 4 * radius + arm * (2 * torch.pi / 3) + 0.4 * torch.randn(num_samples, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Mean cross-entropy."""
    points, arm = batch
    return F.cross_entropy(model(points), arm)


job = ml.Job(
    model=lambda: nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)),
    loss=loss,
    optimizer=lambda named: torch.optim.Adam(named, lr=2e-2),
    data=lambda: spirals(300, seed=1),
    batch_size=100,
    steps=400,
    evaluate=ml.Evaluate(lambda: spirals(500, seed=2), {"loss": loss}, every=20),
)


def main() -> None:
    """Train until three evaluations in a row were no better than the best one."""
    best, patience = float("inf"), 3
    with ml.Trainer(job, "dp=4") as trainer:
        for batch in trainer.batches():
            train_loss = trainer.step(batch)
            if trainer.next_step % job.evaluate.every:
                continue
            held_out_loss = trainer.evaluate()["loss"]
            if trainer.world.main:  # one process prints
                print(
                    f"step {trainer.next_step:4}   loss {train_loss:.4f}   held out {held_out_loss:.4f}",
                    flush=True,
                )
            best, patience = (held_out_loss, 3) if held_out_loss < best else (best, patience - 1)
            if not patience:
                break


if __name__ == "__main__":
    main()
