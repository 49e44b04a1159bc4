"""Tensor parallelism in numbers: one product on two ranks, then a transformer that nobody annotated.

    python examples/06_tensor_parallel.py         # prints all of it, on simulated devices
    meshloom verify examples/06_tensor_parallel.py --plan tp=2 --devices cpu --dtype float64

The first half splits Y = X W by hand, by columns and by rows of W, and then lets meshloom take the same step.
The second half is an ordinary model under `tp=2`: what every rank holds of it, what is sent, and that the
losses are those of one device.
"""

from __future__ import annotations

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml
from meshloom.program.cost.cost import costs
from meshloom.tensor_parallel.explain import account_of, text_of
from meshloom.verify.findings import print_report
from meshloom.verify.run import verify

LEARNING_RATE = 0.5
X = torch.tensor([[1.0, 2.0, 0.0, 1.0], [0.0, 1.0, 3.0, 2.0]])  # 2 samples, 4 features
# 4 in, 4 out
W = torch.tensor([[1.0, 0.0, 2.0, 1.0], [0.0, 1.0, 1.0, 0.0], [2.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 2.0]])
# what backward brings: the loss's gradient for Y
D_Y = torch.tensor([[1.0, 0.0, 0.0, 2.0], [0.0, 1.0, 1.0, 0.0]])


# --- One product, by hand.


def show(name: str, values: Tensor) -> None:
    """A small matrix beside its name."""
    for row, line in enumerate(values.tolist()):
        print(f"  {name if row == 0 else '':<44}" + "".join(f"{value:6g}" for value in line))


def by_columns() -> list[Tensor]:
    """W = [W_0 | W_1]: every rank computes some columns of Y. Returns the gradients of W_0 and W_1."""
    parts, gradients = W.chunk(2, dim=1), D_Y.chunk(2, dim=1)
    print("\nSplit by columns: W = [W_0 | W_1]. Both ranks have all of X.\n")
    columns = [X @ part for part in parts]
    for rank, y in enumerate(columns):
        show(f"rank {rank}: Y_{rank} = X W_{rank}", y)
    show("all-gather: Y = [Y_0 | Y_1]", torch.cat(columns, dim=1))
    assert torch.equal(torch.cat(columns, dim=1), X @ W)
    print("  Backward: a rank needs its columns of dY alone.")
    weights = [X.T @ gradient for gradient in gradients]
    inputs = [gradient @ part.T for gradient, part in zip(gradients, parts, strict=True)]
    for rank in range(2):
        show(f"rank {rank}: dW_{rank} = X^T dY_{rank}  (stays here)", weights[rank])
    for rank in range(2):
        show(f"rank {rank}: dX_{rank} = dY_{rank} W_{rank}^T  (a part of a sum)", inputs[rank])
    show("all-reduce: dX = dX_0 + dX_1", inputs[0] + inputs[1])
    assert torch.equal(inputs[0] + inputs[1], D_Y @ W.T)
    return weights


def by_rows() -> list[Tensor]:
    """W_0 above W_1, X = [X_0 | X_1]: every rank computes a part of a sum. Returns the gradients of W_0 and
    W_1."""
    parts, inputs = W.chunk(2, dim=0), X.chunk(2, dim=1)
    print(
        "\nSplit by rows: W_0 above W_1, and X = [X_0 | X_1]. The inner dimension is divided, so Y is a sum.\n"
    )
    sums = [x @ part for x, part in zip(inputs, parts, strict=True)]
    for rank, y in enumerate(sums):
        show(f"rank {rank}: X_{rank} W_{rank}  (a part of a sum)", y)
    show("all-reduce: Y = X_0 W_0 + X_1 W_1", sums[0] + sums[1])
    assert torch.equal(sums[0] + sums[1], X @ W)
    print("  Backward: both ranks have all of dY, and nothing is sent.")
    weights = [x.T @ D_Y for x in inputs]
    for rank in range(2):
        show(f"rank {rank}: dW_{rank} = X_{rank}^T dY  (stays here)", weights[rank])
    for rank, part in enumerate(parts):
        show(f"rank {rank}: dX_{rank} = dY W_{rank}^T  (its columns of dX)", D_Y @ part.T)
    assert torch.equal(torch.cat([D_Y @ part.T for part in parts], dim=1), D_Y @ W.T)
    return weights


# --- The same step by meshloom. A linear layer keeps W transposed: [out, in].


def product_model() -> nn.Module:
    model = nn.Linear(4, 4, bias=False)
    model.weight.data.copy_(W.T)
    return model


def product_loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    """A sum over samples and their number: the mean of sum(Y * dY) has the gradient dY / 2 for Y."""
    x, gradient = batch
    return (model(x) * gradient).sum(), len(x)


product_job = ml.Job(
    model=product_model,
    loss=product_loss,
    optimizer=lambda named: torch.optim.SGD(named, lr=LEARNING_RATE),
    data=lambda: TensorDataset(X, D_Y),
    batch_size=2,
    steps=1,
    shuffle=False,
)


def step_of(split: str, gradients: list[Tensor]) -> None:
    """One step with W pinned to a split; every rank's new part is its old one minus its own gradient."""
    print(
        f"  The same step by meshloom under tp=2, W pinned to {split}: W_i - {LEARNING_RATE} dW_i / {len(X)} samples."
    )
    with ml.Trainer(
        product_job, ml.Plan(tp=2, tp_placements={"weight": split}), devices="simulated"
    ) as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
        for rank, (replica, before, gradient) in enumerate(
            zip(trainer.replicas, W.chunk(2, dim=1 if split == "column" else 0), gradients, strict=True)
        ):
            after = replica.model.weight.detach().T
            show(f"meshloom, rank {rank}: W_{rank} after a step of SGD", after)
            # small whole numbers: exact
            torch.testing.assert_close(after, before - LEARNING_RATE * gradient / len(X), rtol=0.0, atol=0.0)


# --- A transformer on two devices: the model and its loss know nothing of ranks.

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH, STEPS = 61, 32, 4, 16, 8, 3  # 61 cannot be halved


class Block(nn.Module):
    """[batch, length, width] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Mean cross-entropy of the next token."""
    (tokens,) = batch
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def counting() -> TensorDataset:
    """Tokens [length + 1] that count up from anywhere."""
    starts = torch.randint(VOCABULARY, (BATCH * STEPS, 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset((starts + torch.arange(LENGTH + 1)) % VOCABULARY)


job = ml.Job(
    model=Transformer,
    loss=loss,
    optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
    data=counting,
    batch_size=BATCH,
    steps=STEPS,
    clip_grad_norm=1.0,
)


def losses_under(plan: str) -> list[float]:
    """The loss of every step."""
    with ml.Trainer(job, plan, devices="simulated") as trainer:
        return [trainer.step(batch) for batch in trainer.batches()]


def transformer() -> None:
    """The job under tp=2 beside one device."""
    with ml.Trainer(job, "tp=2", devices="simulated") as trainer:
        whole = Transformer()
        parts = [dict(replica.model.named_parameters()) for replica in trainer.replicas]
        print("\nA transformer under tp=2: shapes of the parameters, on one device and on each rank.\n")
        for name, parameter in whole.named_parameters():
            if not name.startswith("blocks.1"):
                shapes = [str(list(part[name].shape)) for part in parts]
                print(
                    f"  {name:<34}{list(parameter.shape)!s:<12}" + "".join(f"{shape:<12}" for shape in shapes)
                )
        sizes = [sum(each.numel() for each in part.values()) for part in parts]
        print(
            f"  {'elements in all':<34}{sum(each.numel() for each in whole.parameters()):<12}"
            + "".join(f"{size:<12}" for size in sizes)
        )
        print("\nWhat was chosen, and what a chunk sends.\n")
        part = trainer.replicas[0].engine.stages.division.first
        account = text_of(account_of(part, costs(part.choice.layout.program)))
        # norms and biases, and why
        print("\n".join(f"  {line}" for line in account.splitlines() if not line.startswith("Whole: ")))
        after = [trainer.step(batch) for batch in trainer.batches()]
    before = losses_under("dp=1")
    print("\nstep   one device         tp=2")
    for step, (one, two) in enumerate(zip(before, after, strict=True)):
        print(f"{step:4}{one:13.6f}{two:13.6f}")
    # float32, sums in another order, three steps of AdamW
    torch.testing.assert_close(after, before, rtol=1e-4, atol=0.0)
    print(
        "\nThe losses are the same up to rounding. Gradients, norm and updated parameters, compared in float64:\n",
        flush=True,
    )
    report = verify(job, ml.Plan(tp=2), devices="simulated", steps=1, dtype=torch.float64)
    if not report.passed:
        raise SystemExit(
            "The plan differs from one device. Run: meshloom verify examples/06_tensor_parallel.py --plan tp=2"
        )
    print_report(report, Console(width=120))


def main() -> None:
    print("One product Y = X W on two ranks.\n")
    for name, values in (("X", X), ("W", W), ("Y = X W, on one device", X @ W), ("dY", D_Y)):
        show(name, values)
    columns = by_columns()
    step_of("column", columns)
    rows = by_rows()
    step_of("row", rows)
    transformer()


if __name__ == "__main__":
    main()
