"""The laboratory: exchanges, steps and traffic on links of known bandwidth, next to the formulas.

python benchmarks/links/main.py --json FILE --figures docs/figures        # everything, about 25 minutes
python benchmarks/links/main.py exchange --hosts 2 3 4 --json -           # a part of it
python benchmarks/links/main.py --records FILE ... --figures docs/figures # tables and pictures of what was
measured before
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # ranks that end a moment before others make torch warn

import torch
from curves import loss_curves
from exchanges import ALL_REDUCES, NUM_BYTES, time_exchanges
from network import Host, Shape, loopback, network, why_not
from overlap import time_overlap
from speedup import time_speedup
from tables import tables
from traffic import count_traffic

sys.path.append(str(Path(__file__).parents[1]))
from records import write_records

PARTS = ("exchange", "overlap", "curves", "traffic", "speedup")
Record = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument(
        "--json", metavar="FILE", help="write one record per line to FILE; - is standard output"
    )
    parser.add_argument("--figures", metavar="DIR", type=Path, help="draw what the records have")
    parser.add_argument(
        "--records",
        metavar="FILE",
        nargs="+",
        type=Path,
        help="measure nothing, take what --json has written",
    )
    parser.add_argument(
        "--hosts",
        type=int,
        nargs="+",
        default=[2, 3, 4, 5, 6, 7, 8],
        help="exchange, overlap and speedup: how many; default: 2 to 8",
    )
    parser.add_argument(
        "--algorithms",
        nargs="+",
        default=ALL_REDUCES,
        choices=ALL_REDUCES,
    )
    parser.add_argument(
        "--servers",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8],
        help="exchange: servers; more than one only with the most hosts",
    )
    parser.add_argument("--rounds", type=int, default=7, help="exchange: of each algorithm, in turns")
    parser.add_argument("--slow-rounds", type=int, default=2, help="exchange: of servers")
    parser.add_argument("--bytes", type=int, default=NUM_BYTES, help="exchange: of the tensor")
    parser.add_argument("--steps", type=int, default=3, help="overlap, traffic and speedup: of each run")
    parser.add_argument(
        "--megabits", type=float, default=200.0, help="per second, of every link in each direction"
    )
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"{', '.join(unknown)}: no such part. Parts are {', '.join(PARTS)}.")
    torch.set_num_threads(1)
    if arguments.records:
        records = [json.loads(line) for path in arguments.records for line in path.read_text().splitlines()]
    else:
        records = measure(arguments)
    write_records(records, arguments.json)
    print("\n\n".join(tables(records)), file=sys.stderr)
    if arguments.figures:
        from figures import draw

        for path in draw(records, arguments.figures):
            print(path, file=sys.stderr)
    return 0


def measure(arguments: argparse.Namespace) -> list[Record]:
    """The records of all parts that are asked for."""
    parts = arguments.parts or PARTS
    shape = Shape(bits_per_second=arguments.megabits * 1e6)
    most = max(arguments.hosts)
    reason = why_not()
    with ExitStack() as stack:
        # What was measured of this machine lies at home, and would decide how models are divided.
        os.environ["HOME"] = stack.enter_context(tempfile.TemporaryDirectory())
        if reason:
            print(
                f"Over loopback, where links are as fast as memory and formulas use the measured rate: {reason}.",
                file=sys.stderr,
            )
            hosts = loopback(2 * most)
        else:
            hosts = stack.enter_context(network(2 * most, shape))
        rate = None if reason else shape.bytes_per_second
        records: list[Record] = []
        for part in parts:
            print(f"{part} ...", file=sys.stderr)
            records += measure_part(part, hosts, arguments, rate)
    place = "loopback" if reason else f"{arguments.megabits:g} Mbit/s"
    return [record | {"links": place} for record in records]


def measure_part(
    part: str, hosts: Sequence[Host], arguments: argparse.Namespace, bytes_per_second: float | None
) -> list[Record]:
    """bytes_per_second: of a link; None: not known."""
    if part == "exchange":
        records: list[Record] = []
        for number in arguments.hosts:
            servers = [
                count
                for count in arguments.servers
                if count == 1 or (number == max(arguments.hosts) and count <= number)
            ]
            rounds = arguments.rounds, arguments.slow_rounds
            records += time_exchanges(
                hosts, number, arguments.algorithms, servers, arguments.bytes, *rounds, bytes_per_second
            )
        return records
    if part == "overlap":
        return [
            time_overlap(hosts, number, 2, arguments.steps)
            for number in (2, 3, 4)
            if number <= max(arguments.hosts)
        ]
    if part == "curves":
        return loss_curves(hosts)
    if part == "traffic":
        return count_traffic(hosts, arguments.steps)
    sizes = [number for number in (2, 4, 8) if number <= max(arguments.hosts)]
    return time_speedup(hosts, sizes, arguments.steps, bytes_per_second)


if __name__ == "__main__":
    sys.exit(main())
