"""The data of a replica of several ranks: the first of them reads, and sends the chunks to the others."""

from __future__ import annotations

from meshloom.comm.group import Group
from meshloom.comm.objects import scatter_objects, share
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.data.chunks import Chunk, Reader
from meshloom.data.job_data import open_reader
from meshloom.data.shares import Shares


def open_team_reader(
    job: Job,
    plan: Plan,
    readers: Group,
    team: Group,
    start_step: int,
    stop_step: int,
    shares: Shares | None = None,
) -> Reader:
    """`open_reader` for a rank of `team`, whose first rank reads. readers: its peers along dp."""
    reader: Reader | None = None
    if team.rank == 0:
        reader = open_reader(job, plan, readers, start_step, stop_step, shares)
    num_samples: int | None = share(team, reader.num_samples if reader else None)
    return TeamReader(reader, num_samples, team)


class TeamReader(Reader):
    """The reader of a rank of `team`. reader: of the first rank; None on the others."""

    def __init__(self, reader: Reader | None, num_samples: int | None, team: Group) -> None:
        self._reader, self._num_samples, self._team = reader, num_samples, team

    @property
    def num_samples(self) -> int | None:
        return self._num_samples

    def read(self, step: int) -> list[Chunk]:
        chunks = self._reader.read(step) if self._reader else []
        return scatter_objects(self._team, [chunks] * self._team.size if self._reader else None)

    def close(self) -> None:
        if self._reader:
            self._reader.close()
