"""Writes a checkpoint's files from several hosts: each file by one rank, to which the others send their parts of it.

    rank 0      make model    | its parts, and those that rank r sends | checksum, flush
    rank r      make state-0  | its parts, and those that rank 0 sends | checksum, flush

Several hosts cannot write into one file: over a network file system their bytes would overwrite each other's
pages. Ranks of one host write as `parallel.py` says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from meshloom.checkpoint.checksums import Sum, of_files, sum_of_share
from meshloom.checkpoint.writing.file_layout import HeldSpan
from meshloom.checkpoint.writing.parallel import DividedState, Part, create_files, flush, write_parts
from meshloom.checkpoint.writing.problems import Problem, attempt
from meshloom.checkpoint.writing.saving import Write, WrittenFiles, check_seen
from meshloom.comm.group import Group
from meshloom.comm.objects import collect
from meshloom.core.device.flat_bytes import flat_bytes


def write_across_hosts(divided: DividedState) -> Write:
    """Writes what ranks have agreed on. A rank has one part of another at a time in memory."""
    layout, parts = divided.layout, divided.parts

    def write(directory: Path, temporary: Path, group: Group) -> WrittenFiles:
        rank, count = group.rank, len(layout.files)
        writers = {each.name: number * group.size // count for number, each in enumerate(layout.files)}
        mine = [each for each in layout.files if writers[each.name] == rank]
        sizes = {each.name: each.num_bytes for each in mine}
        problem: Problem | None = None
        sums: list[Sum] = []

        def attempt_to(action: Callable[[], None]) -> None:
            # a rank that cannot write stays with the others to the end
            nonlocal problem
            problem = problem or attempt(rank, directory, sum(sizes.values()), action)

        def make() -> None:
            check_seen(temporary)
            create_files(temporary, mine)

        def put(part: Part) -> None:
            attempt_to(lambda: write_parts(temporary, layout, [part]))

        attempt_to(make)
        everyone = collect(group, [span.to_json() for span, _ in parts])
        left = iter(parts)
        for source, told in enumerate(everyone):
            for span in map(HeldSpan.from_json, told):
                writer = writers[layout.place(span)[0].name]
                if source == rank:
                    part = next(left)
                    put(part) if writer == rank else group.send(flat_bytes(part[1].to("cpu")), writer).wait()
                elif writer == rank:
                    received = torch.empty(span.num_bytes, dtype=torch.uint8)
                    group.recv(received, source).wait()
                    put((span, received.view(span.dtype)))
        attempt_to(lambda: flush(temporary, mine))
        attempt_to(lambda: sums.extend(sum_of_share(temporary, sizes, 0, 1)))
        found = of_files(sums)
        return WrittenFiles(
            problem=problem,
            files={} if problem else {name: {"bytes": size, "crc32": found[name]} for name, size in sizes.items()},
            pieces=layout.pieces(),
            weights=[each.name for each in layout.weights],
            index=layout.index(),
        )  # fmt: skip

    return write
