"""What selective recomputation keeps: the exact minimum of bytes kept and seconds of recomputing, weighted.

A value that backward needs is kept, which costs its bytes, or its operator is recomputed, which costs its
seconds and needs the operator's operands. That is a minimum cut (Picard, 1976, on closures). Every operator
has two vertices; those on the side of `end` are available in backward:

    start --price of recomputing--> runs --bytes of the result--> result --(saved for backward)--> end
                                       |                              |
                                       +--inner bytes--> end          +--(operand)--> runs, of the operators that use it
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy

from meshloom.program.recompute.segments import Segment

_MOST = 2**30  # of all finite capacities, scaled to integers


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Facts about an operator. price: bytes that are worth recomputing it; None: never. result_bytes,
    inside_bytes: of its result and of its inner tensors.

    result_saved: whether backward needs its result. views: whether its result is a view of its first operand.
    """

    price: float | None
    result_bytes: int
    inside_bytes: int
    result_saved: bool
    views: bool


def cheapest_kept(
    segment: Segment, candidates: Mapping[str, Candidate], borders: Collection[str]
) -> set[str]:
    """Nodes of the segment whose results are kept, and `NODE:` for nodes whose inner tensors are.

    borders: nodes whose results are kept anyway, as later segments read them.
    """
    network = _Network()
    for node in segment.nodes:
        each = candidates[node.name]
        network.add("start", f"{node.name} runs", each.price)
        result_bytes = 0.0 if node.name in borders else each.result_bytes
        network.add(f"{node.name} runs", node.name, None if each.views else result_bytes)
        network.add(f"{node.name} runs", "end", each.inside_bytes)
        for ref in node.operands():
            if ref.name in candidates and ref.name not in segment.given:
                network.add(ref.name, f"{node.name} runs", None)
        if each.result_saved:
            network.add(node.name, "end", None)
    apart = network.start_side()
    kept = {node.name for node in segment.nodes if f"{node.name} runs" in apart and node.name not in apart}
    return kept | {
        f"{node.name}:"
        for node in segment.nodes
        if f"{node.name} runs" in apart and candidates[node.name].inside_bytes
    }


@dataclass
class _Network:
    numbers: dict[str, int] = field(default_factory=lambda: {"start": 0, "end": 1})
    edges: list[tuple[int, int, float | None]] = field(default_factory=list[tuple[int, int, float | None]])

    def add(self, source: str, target: str, capacity: float | None) -> None:
        """Add an edge. capacity None: infinite."""
        if capacity is None or capacity > 0:
            start, end = (self.numbers.setdefault(each, len(self.numbers)) for each in (source, target))
            self.edges.append((start, end, capacity))

    def start_side(self) -> set[str]:
        """The vertices on the side of `start` of the minimum cut nearest to it."""
        from scipy.sparse import csr_array  # takes most of a second to import, which few processes need
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        total = sum(capacity for _, _, capacity in self.edges if capacity is not None)
        if not total:
            return set(self.numbers) - {"end"}
        count = len(self.numbers)
        scale = (_MOST - len(self.edges)) / total
        capacities = [
            _MOST if capacity is None else max(round(capacity * scale), 1) for _, _, capacity in self.edges
        ]
        rows, columns = [source for source, _, _ in self.edges], [target for _, target, _ in self.edges]
        entries = numpy.array(capacities, dtype=numpy.int32), (rows, columns)
        whole = csr_array(entries, shape=(count, count), dtype=numpy.int32)
        flow = maximum_flow(whole, 0, 1).flow
        left = whole - flow  # also back along what flows
        left.data = (left.data > 0).astype(numpy.int32)
        left.eliminate_zeros()
        reached = {int(number) for number in breadth_first_order(left, 0, return_predecessors=False)}
        return {name for name, number in self.numbers.items() if number in reached}
