"""Runs a function on ranks that live on given hosts: forked processes of one thread, which end with this
one."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from network import Host

PORT = 29500  # nobody else is in a new namespace
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def on_hosts(
    hosts: Sequence[Host],
    places: Sequence[int],
    function: Callable[..., Any],
    *arguments: Any,
    timeout_seconds: float = 600.0,
) -> list[Any]:
    """What `function(*arguments)` returns on each rank. places: by rank, the number of its host among
    `hosts`.

    A rank has the environment that torchrun would give it. The first that fails ends all; its traceback is
    the error. This process may not have run a backward, which leaves threads that a forked process does not
    have.
    """
    context = multiprocessing.get_context("fork")  # torch is imported once
    port = PORT if hosts[0].holder is not None else free_port()
    ranks, pipes = [], []
    try:
        for rank in range(len(places)):
            ours, theirs = context.Pipe(duplex=False)
            ranks.append(
                context.Process(
                    target=_rank,
                    args=(theirs, hosts, places, rank, port, os.getpid(), function, arguments),
                    daemon=True,
                )
            )
            ranks[-1].start()
            theirs.close()
            pipes.append(ours)
        return _answers(pipes, timeout_seconds)
    finally:
        for rank, pipe in zip(ranks, pipes, strict=False):
            rank.kill()
            rank.join()
            pipe.close()


def _answers(pipes: list[Connection], timeout_seconds: float) -> list[Any]:
    answers: list[Any] = [None] * len(pipes)
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout_seconds)
        if not ready:
            raise SystemExit(f"Ranks {sorted(waiting.values())} did not answer within {timeout_seconds:g} s.")
        for pipe in ready:
            rank = waiting.pop(pipe)  # type: ignore[call-overload]
            try:
                well, answers[rank] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                raise SystemExit(f"Rank {rank} ended without an answer.") from None
            if not well:
                raise SystemExit(f"Rank {rank} failed.\n{answers[rank]}")
    return answers


def _rank(
    pipe: Connection,
    hosts: Sequence[Host],
    places: Sequence[int],
    rank: int,
    port: int,
    parent: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended before that
        os._exit(1)
    with closing(pipe):
        try:
            host = hosts[places[rank]]
            host.enter()
            os.environ |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "LOCAL_RANK": str(list(places[:rank]).count(places[rank])),
                "LOCAL_WORLD_SIZE": str(list(places).count(places[rank])),
                "MASTER_ADDR": hosts[places[0]].address,
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": host.interface,
                "OMP_NUM_THREADS": "1",
            }
            torch.set_num_threads(1)
            answer = True, function(*arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)


def free_port() -> int:
    """Of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
