"""Seconds of an all-reduce over Gloo on the loopback of one host: on a ring of messages, beside Gloo's own.

    python benchmarks/rings/main.py --ranks 2 4 --bytes 4096 65536 1048576 26214400
    python benchmarks/rings/main.py --ranks 2 --bytes 26214400 --chunks 131072 524288 2097152

Systems take turns in every round, in an order that is reversed from round to round; the first round is not
counted. The slowest rank counts.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist

from meshloom.comm.collectives.ring import CHUNK_BYTES, RingGroup, ring_group
from meshloom.comm.group import Group
from meshloom.comm.torch.c10d import C10dGroup


def main() -> None:
    """Measure, print a table, and the records as JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bytes", type=int, nargs="+", default=[4 << 10, 64 << 10, 1 << 20, 25 << 20])
    parser.add_argument("--chunks", type=int, nargs="+", default=[CHUNK_BYTES], help="bytes sent at once")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE", help="where to write the records")
    request = parser.parse_args()
    records = [record for size in request.ranks for record in _measured(size, request)]
    print(f"{'ranks':>5} {'bytes':>10} {'system':>20} {'ms':>9} {'/ Gloo':>7}")
    for each in records:
        print(
            f"{each['ranks']:>5} {each['bytes']:>10} {each['system']:>20} {each['milliseconds']:>9.3f} {each['over_gloo']:>7.2f}"
        )
    if request.json:
        with open(request.json, "w") as file:
            json.dump(records, file, indent=1)


def _measured(size: int, request: argparse.Namespace) -> list[dict[str, Any]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    context = get_context("spawn")
    queue = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(rank, size, port, request, queue), daemon=True)
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    records = queue.get(timeout=600)
    for rank in ranks:
        rank.join()
    return records


def _rank(rank: int, size: int, port: int, request: argparse.Namespace, queue: Any) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    names = [f"rank {other}" for other in range(size)]

    def gloo() -> Group:
        process_group = dist.new_group(list(range(size)))
        assert isinstance(process_group, dist.ProcessGroup)
        return C10dGroup(process_group, names)

    systems: dict[str, Group] = {"gloo": gloo()}
    for chunk in request.chunks:
        name = "ring" if len(request.chunks) == 1 else f"ring {chunk >> 10} KiB"
        systems[name] = ring_group(gloo(), chunk_bytes=chunk)
    records = [
        record for num_bytes in request.bytes for record in _compare(systems, num_bytes, request.rounds)
    ]
    if rank == 0:
        queue.put(records)
    dist.barrier()
    for group in systems.values():
        if isinstance(group, RingGroup):
            group.close()
    dist.destroy_process_group()


def _compare(systems: dict[str, Group], num_bytes: int, rounds: int) -> list[dict[str, Any]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.empty(num_bytes // 4)
    for name, group in systems.items():
        group.all_reduce(tensor.fill_(rank + 1)).wait()
        assert bool((tensor == size * (size + 1) / 2).all()), f"{name} is wrong"
    calls = max(1, min(200, (4 << 20) // num_bytes))
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(rounds + 1):
        for name in list(systems)[:: 1 if number % 2 else -1]:
            tensor.zero_()
            systems[name].all_reduce(tensor).wait()
            dist.barrier()
            began = time.perf_counter()
            for _ in range(calls):
                systems[name].all_reduce(tensor).wait()
            took = torch.tensor([(time.perf_counter() - began) / calls])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if number:
                seconds[name].append(float(took))
    return [
        {
            "ranks": size, "bytes": num_bytes, "system": name, "milliseconds": statistics.median(found) * 1000,
            "over_gloo": statistics.median(mine / own for mine, own in zip(found, seconds["gloo"], strict=True)),
        }
        for name, found in seconds.items()
    ]  # fmt: skip


if __name__ == "__main__":
    main()
