"""A rank joins the processes that were started together with it, and leaves them at the end."""

from __future__ import annotations

import atexit
import faulthandler
import mmap
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from meshloom.comm.group import Group
from meshloom.comm.liveness.activity import PAGE_BYTES, Activity, is_page
from meshloom.comm.network.signed_store import SignedStore
from meshloom.comm.shm.native_engine import why_not
from meshloom.core.errors import DeviceError, PeerLostError
from meshloom.core.mesh import Mesh
from meshloom.core.units import format_count
from meshloom.launch.connecting import RankGroups
from meshloom.launch.devices import Kind
from meshloom.launch.environment import (
    LaunchedRank,
    activity_descriptor,
    launched_devices,
    launched_secret,
    launched_transport,
    report_descriptor,
    scratch_directory,
)
from meshloom.launch.events import STACK_SIGNAL, send_event
from meshloom.launch.failure import leave, line_of, own_line
from meshloom.launch.names import rank_name, visible_gpus
from meshloom.launch.transport import agreed_transports
from meshloom.launch.world import CARRIES_TENSORS, REDUCES, Use, World, connect_rank
from meshloom.machine.cores import cores

FAREWELL_SECONDS = 5.0  # how long a finished rank waits for the others before its connections close


def join(
    mesh: Mesh, launched: LaunchedRank, devices: str, timeout: timedelta, transport: str, *, ring: bool, saving: bool
) -> World:  # fmt: skip
    """Meet the other ranks in the store, agree on devices and transports, and connect.

    ring, saving: of `open_world`.
    Raises `PeerLostError` if the others do not come in time, `DeviceError` for a ring on GPUs.
    """
    send_event({"event": "joining"})
    # data workers create sockets there, which remain when they are killed
    if scratch := scratch_directory():
        # There is no documented setting: `tempfile.tempdir` would move the user's own files too, and socket
        # names in a subdirectory may be too long.
        multiprocessing.current_process()._config["tempdir"] = scratch  # type: ignore[attr-defined]
    activity = _open_activity()
    activity.enter("joining")
    try:
        ours = not dist.is_initialized()  # otherwise the user's script has initialized it
        store = meeting_place(launched, timeout) if ours else dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        # Ranks may open several worlds, one after another; each has its own part of the store.
        opened = store.add(f"meshloom/opened/{launched.rank}", 1)
        store = dist.PrefixStore(f"meshloom/{opened}", store)
        store.set_timeout(timeout)
        members = [rank_name(rank, mesh) for rank in range(mesh.size)]
        signed = SignedStore(dist.PrefixStore("signed", store), launched.rank, members, launched_secret())
        kind, device, reason = _agreed_device(launched, devices, signed)
        if ring and kind == "cuda":
            raise DeviceError(
                "exchange=ring adds up on CPUs, and each rank has a GPU, where NCCL has rings and trees of its own. "
                "Use exchange=all_reduce, or devices=cpu."
            )
        both = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        rank, size = launched.rank, launched.size
        if ours:
            world_store = dist.PrefixStore("world", store)
            dist.init_process_group(both, store=world_store, rank=rank, world_size=size, timeout=timeout)
        transports = agreed_transports(signed, mesh, launched_transport(transport), why_not())
        group_store, key = dist.PrefixStore("groups", store), signed.key("groups")
        connections = RankGroups(mesh, rank, group_store, transports, device, timeout, key)

        def connect(members: Sequence[Sequence[int]], use: Use) -> Group:
            backend = both if use in CARRIES_TENSORS else "gloo"
            return connections.connect(members, backend, ring=ring and use in REDUCES)

        local = connect_rank(mesh, rank, device, connect, activity, saving=saving)
    except (RuntimeError, OSError) as error:
        how = " ".join(str(error).split())[:300]
        raise PeerLostError(
            f"{rank_name(launched.rank, mesh)} could not join the other {launched.size - 1} ranks at {launched.address}:{launched.port}: {how}"
        ) from error
    if kind == "cuda":
        torch.cuda.set_device(device)
        used, communicating = "one GPU each", ""
    else:
        used = f"{format_count(torch.get_num_threads(), 'thread')} each"
        communicating = f", {transports.text(mesh)}"
    here = f"{launched.local_size} on each machine's" if launched.local_size < launched.size else "on"
    why = f"{kind}: {format_count(launched.size, 'rank')} as processes {here} {format_count(cores(), 'core')}, {used} ({reason}){communicating}"
    activity.enter("own code")
    send_event({"event": "joined"})

    def left_by(error: BaseException) -> Sequence[str]:
        return _ended(local.rank, mesh, store) if isinstance(error, PeerLostError) else ()

    world = World(mesh, [local], kind, why, left_by)
    world.end = _parting(world, store, connections, ours)
    return world


def _open_activity() -> Activity:
    """The activity in the page that our launcher has created for this rank; private without a launcher."""
    descriptor = activity_descriptor()
    if descriptor is not None:
        # a program started by a rank inherits the variable, and the descriptor may be another file
        with suppress(OSError, ValueError):
            if os.fstat(descriptor).st_nlink == 0 and os.fstat(descriptor).st_size == PAGE_BYTES:
                page = memoryview(mmap.mmap(descriptor, PAGE_BYTES))
                if is_page(page):
                    if signal.getsignal(STACK_SIGNAL) == signal.SIG_DFL:  # the user's own handler stays
                        faulthandler.register(
                            STACK_SIGNAL, report_descriptor() or sys.stderr, all_threads=False
                        )
                    return Activity(page)
    return Activity()


def _parting(world: World, store: dist.Store, connections: RankGroups, ours: bool) -> Callable[[bool], None]:
    """The function that ends a rank's world. Until then uncaught errors of the user's script are reported."""
    previous, local = sys.excepthook, world.local[0]

    def uncaught(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        leave(world.report(error))

    def end(well: bool) -> None:
        atexit.unregister(at_exit)
        if well and sys.excepthook is uncaught:  # after a failure the error is still on its way up
            sys.excepthook = previous
        if well and _meet_again(world, store):
            connections.close()
            if dist.is_initialized():  # else whoever made the first group, such as Ray, has ended all
                for process_group in [None] if ours else connections.process_groups:
                    dist.destroy_process_group(process_group)
        else:  # destroying would wait for operations that the others may never start
            for group in local.all_groups():
                group.abort()

    def at_exit() -> None:
        try:
            local.check_end()
        except PeerLostError as error:
            leave(world.report(error))
        end(True)

    sys.excepthook = uncaught
    atexit.register(at_exit)
    return end


def _meet_again(world: World, store: dist.Store) -> bool:
    """Whether all ranks have reached this end: closing may lose data that a slower rank has not read yet."""
    leaving = sys.exception()  # SystemExit, while it is handled
    where = (
        f"at {own_line(leaving)}" if leaving else f"after {line_of(world.reached)}" if world.reached else ""
    )
    try:
        store.set(f"parting/{world.local[0].rank}", where)
        everyone = [f"parting/{other}" for other in range(world.mesh.size)]
        until, pause = time.monotonic() + FAREWELL_SECONDS, 0.001
        while not store.check(everyone):  # a wait that ends without them prints warnings of torch's
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
    except RuntimeError:  # some rank is elsewhere, or the store has ended with its rank
        return False
    return True


def _ended(rank: int, mesh: Mesh, store: dist.Store) -> list[str]:
    """The other ranks that have come to their end, each with the line at which it left, or the last at which they had to do with each other."""
    found: list[str] = []
    with suppress(RuntimeError):  # the store has ended with its rank
        for other in range(mesh.size):
            if other != rank and store.check([key := f"parting/{other}"]):
                where = store.get(key).decode()
                found.append(rank_name(other, mesh) + (f", {where}," if where else ""))
    return found


def meeting_place(launched: LaunchedRank, timeout: timedelta) -> dist.Store:
    hosts = launched.hosts_store
    return dist.TCPStore(
        launched.address, launched.port, None, is_master=hosts, timeout=timeout, wait_for_workers=False,
        multi_tenant=hosts,
    )  # fmt: skip


def _agreed_device(
    launched: LaunchedRank, devices: str, store: SignedStore
) -> tuple[Kind, torch.device, str]:
    """The kind of device of all ranks, cuda if each has its own GPU; this rank's device, and the reason."""
    wanted = launched_devices(devices)
    count = torch.cuda.device_count()
    index = launched.local_rank % max(1, count)
    # some clusters show each process all GPUs of a machine, others one: what counts is whether ranks share
    own = ""
    if count and wanted != "cpu":
        own = f"{socket.gethostname()}/{torch.cuda.get_device_properties(index).uuid}"
    seen = store.all_gather("gpu", own)
    num_gpus = len({gpu for gpu in seen if gpu})
    if num_gpus == launched.size:
        return "cuda", torch.device("cuda", index), visible_gpus(num_gpus)
    if wanted == "cuda":
        raise DeviceError(
            f"devices=cuda needs {launched.size} GPUs, one for each rank, and {visible_gpus(num_gpus)}. Use devices=cpu."
        )
    return "cpu", torch.device("cpu"), "asked for" if devices == "cpu" else visible_gpus(count)
