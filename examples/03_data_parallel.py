"""Data parallelism in numbers: 64 samples on four replicas are 4 x 16, and the mean of their gradients is one
device's.

python examples/03_data_parallel.py         # prints the numbers below, on simulated devices
meshloom train examples/03_data_parallel.py --plan dp=4
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml

LEARNING_RATE = 0.1


def samples() -> TensorDataset:
    """64 points x [3] on y = x . (1, -2, 3) + noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, generator=generator)
    noise = 0.1 * torch.randn(64, generator=generator)
    return TensorDataset(x, x @ torch.tensor([1.0, -2.0, 3.0]) + noise)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Mean squared error."""
    x, y = batch
    return F.mse_loss(model(x).squeeze(1), y)


job = ml.Job(
    model=lambda: nn.Linear(3, 1),
    loss=loss,
    optimizer=lambda named: torch.optim.SGD(named, lr=LEARNING_RATE),
    data=samples,
    batch_size=64,
    steps=1,
)


def weight_gradient(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Gradient [3] of the loss of one batch, computed by torch alone."""
    (gradient,) = torch.autograd.grad(loss(model, batch), [model.weight])
    return gradient.flatten()


def show(name: str, values: Tensor) -> None:
    """One line of the table."""
    print(f"{name:<34}" + "".join(f"{value:>12.6f}" for value in values.flatten().tolist()))


def main() -> None:
    """One step of dp=4, with what happens inside computed once more by hand."""
    with ml.Trainer(job, "dp=4", devices="simulated") as trainer:
        models = [replica.model for replica in trainer.replicas]
        before = copy.deepcopy(models[0])
        for batch in trainer.batches():
            print("Gradient of the weight of a linear layer with three inputs.\n")
            gradients = [
                weight_gradient(model, chunk.data) for model, chunk in zip(models, batch.chunks, strict=True)
            ]
            for rank, (chunk, gradient) in enumerate(zip(batch.chunks, gradients, strict=True)):
                show(f"rank {rank}, its {chunk.samples} samples", gradient)
            total = torch.stack(gradients).sum(0)
            show("sum of the four", total)
            show("divided by dp = 4", total / 4)

            whole = [torch.cat(parts) for parts in zip(*(chunk.data for chunk in batch.chunks), strict=True)]
            single = weight_gradient(before, whole)
            show(f"one device, all {len(whole[0])} samples", single)
            # float32: the 64 samples are added in another order
            torch.testing.assert_close(total / 4, single, rtol=1e-5, atol=1e-6)

            trainer.step(batch)
        print("\nThe weight before and after the step.\n")
        show("all ranks, before", before.weight)
        show("one device, after", before.weight.flatten() - LEARNING_RATE * single)
        for rank, model in enumerate(models):
            show(f"rank {rank}, after", model.weight)
        identical = all(
            torch.equal(a, b)
            for model in models
            for a, b in zip(model.parameters(), models[0].parameters(), strict=True)
        )
        if not identical:
            raise SystemExit("The replicas differ, which they never should.")
        torch.testing.assert_close(
            models[0].weight.flatten(), before.weight.flatten() - LEARNING_RATE * single, rtol=1e-5, atol=1e-6
        )
        print("\nAll replicas hold bit-identical parameters, equal to the single device's up to rounding.")


if __name__ == "__main__":
    main()
