"""Runs a function on N rank processes, as tests of processes need it.

The processes are forked from a server that has imported torch and meshloom once, so that a set of ranks
starts in a fraction of a second. It starts when this file is imported, before the first test, and lives as
long as the test run. Ranks find the environment that a launcher would give them; the store that they meet in
listens on a port of the kernel's choice.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

from torch.distributed import TCPStore

from meshloom.core.errors import MeshloomError

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = [
    "pytest",
    "hypothesis",
    "meshloom.cli.main",
    "meshloom.cli.verb_train",
    "meshloom.cli.verb_verify",
    "torch._dynamo",
    "scipy.optimize",
    "scipy.sparse.csgraph",
    "torch.fx.experimental.symbolic_shapes",
]
CONTEXT.set_forkserver_preload(PRELOADED)
if not getattr(multiprocessing.current_process(), "_inheriting", False):  # the ranks import this file too
    forkserver.ensure_running()


class RankError(AssertionError):
    """A rank raised or died; the message carries its traceback."""


def on_ranks(
    function: Callable[..., Any],
    size: int,
    *arguments: Any,
    timeout_seconds: float = 60.0,
    may_die: Collection[int] = (),
) -> list[Any]:
    """What `function(*arguments)` returned on each rank; None for a rank in `may_die` whose process ended.

    `function` is importable: it stands at the top of a test file.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
        )
    ends: list[Connection] = []
    processes: list[Any] = []
    try:
        for rank in range(size):
            here, there = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(
                target=_rank,
                args=(there, function, arguments, rank, size, port, dict(os.environ)),
                daemon=True,
            )
            process.start()
            there.close()
            ends.append(here)
            processes.append(process)
        return _results(ends, time.monotonic() + timeout_seconds, may_die)
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for end in ends:
            end.close()
        del store


def told(call: Callable[[], object]) -> tuple[type[MeshloomError], str, float]:
    """The error that it raises, and after how many seconds."""
    began = time.monotonic()
    try:
        call()
    except MeshloomError as error:
        return type(error), str(error), time.monotonic() - began
    raise AssertionError("nothing was raised")


def _results(ends: list[Connection], deadline: float, may_die: Collection[int]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ends):
        open_ends = [end for rank, end in enumerate(ends) if rank not in results]
        ready = wait(open_ends, max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(ends)) if rank not in results]
            raise RankError(f"Ranks {missing} have not returned in time.")
        for end in ready:
            rank = ends.index(end)  # type: ignore[arg-type]
            try:
                failed, text, result = pickle.loads(ends[rank].recv_bytes())
            except EOFError:
                if rank not in may_die:
                    raise RankError(f"Rank {rank} died.") from None
                failed, text, result = False, "", None
            if failed:
                raise RankError(f"Rank {rank}:\n{text}")
            results[rank] = result
    return [results[rank] for rank in range(len(ends))]


def _rank(
    end: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    size: int,
    port: int,
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays, and need not be looked through
    try:
        answer = (False, "", function(*arguments))
    except BaseException:
        answer = (True, traceback.format_exc(), None)
    end.send_bytes(pickle.dumps(answer))  # by value: this process is gone before the tensors are looked at
    end.close()
    os._exit(0)  # finalization would wait for operations that other ranks will not join
