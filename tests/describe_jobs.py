"""A job file whose model is to be described, for tests of the command line."""

from __future__ import annotations

from torch import Tensor, nn

from tests.test_describe import Stack, job_of

job = job_of(Stack)


class Branching(nn.Module):
    """Takes a way that depends on the values in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return x if x.sum() > 0 else -x


branching = job_of(Branching)
