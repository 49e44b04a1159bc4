"""Ranks in a grid: one batch of 64 under dp=2,tp=2 and under dp=2,pp=2,tp=2 is one step of a single device on
64.

    python examples/09_grid.py       # prints all of it, on simulated devices
    meshloom verify examples/09_grid.py --plan dp=2,pp=2,tp=2 --devices cpu --dtype float64

Along dp the batch is split, and gradients are summed; along pp the layers are, and activations and their
gradients are sent; along tp the parameters are, and activations are gathered and summed. Every rank talks to
the ranks of its row along each axis, and to nobody else.
"""

from __future__ import annotations

import torch
from rich.console import Console
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml
from meshloom.replica.replica_state import full_state
from meshloom.report.terminal import Terminal
from meshloom.telemetry.progress import Listener, Progress

BATCH, WIDTH, HEADS = 64, 32, 4
CLIP = 1.0


class RowReader(nn.Module):
    """A transformer that reads an image row by row: [batch, 8 rows, 8 pixels] -> logits [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.embed(rows)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Mean cross-entropy."""
    images, digits = batch
    return F.cross_entropy(model(images), digits)


def digits() -> TensorDataset:
    """64 of scikit-learn's handwritten digits."""
    found = load_digits()
    return TensorDataset(
        torch.tensor(found.images[:BATCH], dtype=torch.float32) / 16, torch.tensor(found.target[:BATCH])
    )


job = ml.Job(
    model=RowReader,
    loss=loss,
    optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
    data=digits,
    batch_size=BATCH,
    steps=1,
    shuffle=False,
    clip_grad_norm=CLIP,
)


def draw(trainer: ml.Trainer) -> None:
    """Rows along dp, columns along pp and tp; in every cell the rank, the samples it works on and how many
    parameters it holds."""
    plan = trainer.plan
    columns = [(pp, tp) for pp in range(plan.pp) for tp in range(plan.tp)]
    cells = {
        (context.place.dp, context.place.pp, context.place.tp): rank
        for rank, context in enumerate(each.context for each in trainer.replicas)
    }
    print("  " + " " * 22 + "".join(f"pp={pp} tp={tp}".ljust(16) for pp, tp in columns).rstrip())
    for dp in range(plan.dp):
        ranks = [cells[dp, pp, tp] for pp, tp in columns]
        sizes = [sum(each.numel() for _, each in trainer.replicas[rank].named) for rank in ranks]
        first, last = dp * BATCH // plan.dp, (dp + 1) * BATCH // plan.dp - 1
        print(
            f"  dp={dp} samples {first:2}-{last:<5} "
            + "".join(f"rank {rank}".ljust(16) for rank in ranks).rstrip()
        )
        print("  " + " " * 22 + "".join(f"{size:,} held".ljust(16) for size in sizes).rstrip())
    for pp in range(plan.pp):
        held = [[name for name, _ in trainer.replicas[cells[0, pp, tp]].named] for tp in range(plan.tp)]
        modules = dict.fromkeys(
            ".".join(name.split(".")[: 2 if name.startswith("blocks") else 1])
            for names in held
            for name in names
        )
        print(f"  pp={pp} holds parameters of {', '.join(modules)}")
    for axis in ("dp", "pp", "tp"):
        groups = [group for group in plan.mesh.groups(axis) if len(group) > 1]
        if groups:
            print(
                f"  along {axis} talk ranks {'   '.join(' and '.join(map(str, group)) for group in groups)}"
            )


def step_of_one_device(before: dict[str, Tensor]) -> tuple[float, float, dict[str, Tensor]]:
    """The step on all 64 samples by torch alone: loss, norm of the gradient, parameters after it."""
    model = RowReader().double()
    model.load_state_dict(before)
    images, targets = digits()[:]
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    value = loss(model, [images.double(), targets])
    value.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return value.item(), norm.item(), {name: each.detach() for name, each in model.named_parameters()}


def compare(plan: str) -> None:
    """One step under the plan beside one device's, in float64, so that a mistake could not pass for
    rounding."""
    told: list[Progress] = []
    print(f"\n{plan}\n")
    listener = Listener(started=lambda text: None, step=told.append)
    with ml.Trainer(job, plan, devices="simulated", dtype=torch.float64, listener=listener) as trainer:
        draw(trainer)
        before = {name: each.clone() for name, each in trainer.together(full_state)[0].items()}
        summary = trainer.fit()
        after = trainer.together(full_state)[0]
    value, norm, parameters = step_of_one_device(before)
    moved = max(float((each - before[name]).abs().max()) for name, each in parameters.items())
    apart = max(float((each - after[name]).abs().max()) for name, each in parameters.items())
    found = told[0].gradient_norm or 0.0
    print(f"\n  {'':<20}{plan:>20}{'one device':>20}{'difference':>14}")
    print(f"  {'loss':<20}{told[0].loss:20.12f}{value:20.12f}{abs(told[0].loss - value):14.1e}")
    print(f"  {'norm of gradient':<20}{found:20.12f}{norm:20.12f}{abs(found - norm):14.1e}")
    print(
        f"  {'parameters':<20}  all {len(parameters)} tensors; the largest change is {moved:.1e}{apart:14.1e}"
    )
    if max(abs(told[0].loss - value), abs(found - norm), apart) > 1e-10:
        raise SystemExit(
            f"The plan differs from one device. Run: meshloom verify examples/09_grid.py --plan {plan}"
        )
    print("\n  What rank 0 handed to each kind of operation, in bytes, from start to end.\n", flush=True)
    Terminal(Console(width=120)).bytes_table(summary.predicted, summary.counted)


def main() -> None:
    for plan in ("dp=2,tp=2", "dp=2,pp=2,tp=2"):
        compare(plan)


if __name__ == "__main__":
    main()
