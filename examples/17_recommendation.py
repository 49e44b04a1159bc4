"""Recommending from what others chose, with tables much larger than what a batch uses: names to modules that do not use them yet
(matrix factorisation with a pairwise loss; Rendle et al., 2009).

    meshloom train  examples/17_recommendation.py --plan dp=2
    meshloom verify examples/17_recommendation.py --plan dp=2

The users are the source files of Python's library, the items the names in them; a pair is a name in a file. Gradients of the tables are sparse: a
step sends and updates the rows that its batch has used.
"""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml

ROWS, WIDTH, NEGATIVES = 100_000, 32, 8


class Recommender(nn.Module):
    """How well items suit users: users [batch] and items [batch, n] -> scores [batch, n]."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.items = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.popularity = nn.Embedding(ROWS, 1, sparse=True)
        nn.init.normal_(self.users.weight, std=0.1)
        nn.init.normal_(self.items.weight, std=0.1)
        nn.init.zeros_(self.popularity.weight)
        self.taste = nn.Linear(WIDTH, WIDTH)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        wanted = self.taste(self.users(users)).unsqueeze(2)
        return (self.items(items) @ wanted).squeeze(2) + self.popularity(items).squeeze(2)


def pairs(held_out: bool = False) -> TensorDataset:
    """(user, item) of names that occur in five files or more; a tenth is held out. Rows are hashes, as of identifiers that nobody has numbered."""
    directory = Path(sysconfig.get_paths()["stdlib"])
    used: dict[str, list[str]] = {}
    for path in sorted(directory.glob("*.py")) + sorted(directory.glob("*/*.py")):
        if "site-packages" not in path.parts and "test" not in path.parts:
            for name in set(re.findall(r"[A-Za-z_]{4,}", path.read_text(encoding="utf-8", errors="ignore"))):
                used.setdefault(name, []).append(path.relative_to(directory).as_posix())
    every = [(file, name) for name in sorted(used) if len(used[name]) >= 5 for file in used[name]]
    here = [pair for pair in every if (crc32("".join(pair).encode()) % 10 == 0) == held_out]
    rows = torch.tensor([[crc32(each.encode()) % ROWS for each in pair] for pair in here])
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    return TensorDataset(rows[:, 0], rows[:, 1])


def against_others(model: Recommender, users: Tensor, items: Tensor, others: Tensor) -> Tensor:
    """How much better each item suits its user than others do, [batch, others]."""
    scores = model(users, torch.cat([items.unsqueeze(1), others], dim=1))
    return scores[:, :1] - scores[:, 1:]


def loss(model: Recommender, batch: list[Tensor]) -> Tensor:
    """Items that users have should suit them better than items of other users in the batch."""
    users, items = batch
    others = items[torch.randint(len(items), (len(items), NEGATIVES), device=items.device)]
    return -F.logsigmoid(against_others(model, users, items, others)).mean()


def in_first_ten(model: Recommender, batch: list[Tensor]) -> Tensor:
    """How often an item that was held out is among the best 10 of 100, of which the others are any."""
    users, items = batch
    others = items[(torch.arange(len(items)).unsqueeze(1) + torch.arange(1, 100)) % len(items)]
    better = (against_others(model, users, items, others) < 0).sum(1)
    return (better < 10).float().mean()


def optimizers(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """Adam for rows that were used, and for all of the rest."""
    tables = [each for name, each in named if not name.startswith("taste")]
    rest = [each for name, each in named if name.startswith("taste")]
    return [torch.optim.SparseAdam(tables, lr=1e-2), torch.optim.AdamW(rest, lr=3e-3)]


job = ml.Job(
    model=Recommender,
    loss=loss,
    optimizer=optimizers,
    data=pairs,
    batch_size=1024,
    steps=600,
    evaluate=ml.Evaluate(lambda: pairs(held_out=True), {"in first ten": in_first_ten}, every=300),
)
