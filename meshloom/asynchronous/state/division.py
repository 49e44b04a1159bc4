"""Partitions the elements of a model's parameters over servers, as evenly in bytes as possible."""

from __future__ import annotations

from meshloom.core.errors import PlanError
from meshloom.core.job import Job, NamedParameters
from meshloom.exchange.exchange import Slice
from meshloom.optimizer.full_from_slices import assign_evenly
from meshloom.optimizer.user_optimizer import make_optimizers, reach_in_words


def needs_whole(job: Job, named: NamedParameters, num_servers: int) -> bool:
    """Whether the job's optimizers need whole parameters, so that none may be partitioned.

    Raises `PlanError` if they need all parameters together, or if there are fewer parameters than servers.
    """
    if num_servers == 1:
        return False
    user = make_optimizers(job, named)
    if (optimizer := user.looks_at_all) is not None:
        why, instead = reach_in_words(optimizer)
        raise PlanError(
            f"{why}, and with servers={num_servers} no server has them all.{instead or ' Use servers=1.'}"
        )
    whole = "parameter" in user.reaches
    parts = len(named) if whole else sum(parameter.numel() for _, parameter in named)
    if parts < num_servers:
        raise PlanError(
            f"servers={num_servers} is more than the {parts} {'parameters' if whole else 'elements'} of the model. Use servers={parts} or less."
        )
    return whole


def divide_over_servers(named: NamedParameters, num_servers: int, *, whole: bool) -> list[list[Slice]]:
    """The slices of each server, in the order of the parameters. whole: of whole parameters only.

    >>> from torch import nn, zeros
    >>> named = [("a", nn.Parameter(zeros(5))), ("b", nn.Parameter(zeros(3)))]
    >>> [[(each.name, each.start, each.stop) for each in server] for server in divide_over_servers(named, 2, whole=False)]
    [[('a', 0, 4)], [('a', 4, 5), ('b', 0, 3)]]
    """
    parts: list[list[Slice]] = [[] for _ in range(num_servers)]
    if whole:
        servers = assign_evenly([parameter.nbytes for _, parameter in named], num_servers)
        for (name, each), server in zip(named, servers, strict=True):
            parts[server].append(Slice(name, each, 0, each.numel()))
        return parts
    total = sum(parameter.nbytes for _, parameter in named)
    before = 0  # bytes of the parameters so far
    for name, parameter in named:
        for number, part in enumerate(parts):
            bounds = (total * each // num_servers - before for each in (number, number + 1))  # bytes
            start, stop = (
                min(_element(each, parameter.element_size()), parameter.numel()) for each in bounds
            )
            if start < stop or (parameter.numel() == 0 and number == 0):
                part.append(Slice(name, parameter, start, stop))
        before += parameter.nbytes
    return parts


def _element(num_bytes: int, element_size: int) -> int:
    """The first element that begins at byte `num_bytes` or later."""
    return max(0, -(-num_bytes // element_size))
