"""All-reduce over several hosts: rings inside hosts, rings between them for each rank's share, rings inside.

2 hosts with 2 ranks each, shares x and y:

                     host 0                    host 1
                rank 0     rank 1         rank 2     rank 3
    inside      x0+x1      y0+y1          x2+x3      y2+y3       reduce-scatter on the ring of a host
    between     x0+..+x3   y0+..+y3       x0+..+x3   y0+..+y3    all-reduce on the rings 0, 2 and 1, 3: half the bytes from each
    inside      x, y       x, y           x, y       x, y        all-gather on the ring of a host

(Two levels as in Cho et al., "BlueConnect", 2019.) There are as many shares as the smallest host has ranks;
additional ranks of a host send all their elements to a rank that has a share, and receive the result from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshloom.comm.collectives.ring import all_gather, reduce_scatter
from meshloom.comm.moves import AllReduceMoves, divided, moved


def hierarchical(rank: int, hosts: Sequence[int], num_elements: int) -> AllReduceMoves:
    """The all-reduce moves of `rank`, where `hosts[r]` is the host of rank r.

    >>> [str(move) for move in hierarchical(0, [0, 1], 8).moves(mean=False)]
    ['send [4:8] to 1', 'add [0:4] from 1', 'send [0:4] to 1', 'receive [4:8] from 1']
    """
    members = [[other for other, at in enumerate(hosts) if at == host] for host in dict.fromkeys(hosts)]
    here = next(ranks for ranks in members if rank in ranks)
    shares = min(map(len, members))
    index = here.index(rank)
    if index >= shares:
        partner = here[index % shares]
        return AllReduceMoves(
            reduce=moved("send", partner, 0, num_elements),
            owned=(0, 0),
            gather=moved("receive", partner, 0, num_elements),
        )
    additional = [other for number, other in enumerate(here) if number >= shares and number % shares == index]
    inside, between = here[:shares], [ranks[index] for ranks in members]
    place = between.index(rank)
    offsets = divided(0, num_elements, shares)
    own = divided(offsets[index], offsets[index + 1], len(members))
    return AllReduceMoves(
        reduce=[
            *(move for other in additional for move in moved("add", other, 0, num_elements)),
            *reduce_scatter(index, inside, offsets),
            *reduce_scatter(place, between, own),
        ],
        owned=(own[place], own[place + 1]),
        gather=[
            *all_gather(place, between, own),
            *all_gather(index, inside, offsets),
            *(move for other in additional for move in moved("send", other, 0, num_elements)),
        ],
    )
