"""The environments of the processes that this one starts."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from meshloom.launch.environment import (
    REFERENCE,
    launched_transport,
    of_no_rank,
    process_began,
    threads_per_rank,
)
from meshloom.launch.role import Role


def rank_environment(
    rank: int, size: int, port: int, secret: str, devices: str, plan_text: str, transport: str = "auto"
) -> dict[str, str]:
    """The whole environment of a rank that this process starts; the store listens on `port` of this machine.

    secret: with which its ranks sign. Only this user can read a process's environment.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    replaceable = {
        "OMP_NUM_THREADS": str(threads_per_rank(size)),
        "PYTHONUNBUFFERED": "1",  # what a rank printed before it was killed is not lost
        **({"GLOO_SOCKET_IFNAME": loopback} if loopback else {}),
    }
    launched = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # the store is hosted by whoever started the ranks, as under torchrun
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MESHLOOM_PLAN": plan_text,
        "MESHLOOM_SECRET": secret,
        "MESHLOOM_DEVICES": devices,
        "MESHLOOM_TRANSPORT": launched_transport(transport),
        "MESHLOOM_BEGAN": str(process_began()),
    }
    return {**replaceable, **of_no_rank(), **launched}


def script_environment(environment: Mapping[str, str], rank: int, devices: str) -> dict[str, str]:
    """`environment` of a rank that runs a script: it sees one GPU, its own, or none; sets of words are in one order on all ranks."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    own = (visible.split(",")[rank].strip() if visible else str(rank)) if devices == "cuda" else ""
    return {"PYTHONHASHSEED": "0", **environment, "CUDA_VISIBLE_DEVICES": own}


def reference_environment(descriptor: int) -> dict[str, str]:
    """The whole environment of the process in which verification has one device: as of this rank, but of no rank.
    descriptor: of the socket to it."""
    return {**of_no_rank(), REFERENCE: str(descriptor)}


def role_environment(role: Role, num_workers: int) -> dict[str, str]:
    """The whole environment of a server or worker that this process starts."""
    replaceable = {"OMP_NUM_THREADS": str(threads_per_rank(num_workers)), "PYTHONUNBUFFERED": "1"}
    return {**replaceable, **of_no_rank(), "MESHLOOM_ROLE": role.to_json()}


def with_report(environment: Mapping[str, str], descriptor: int, activity: int) -> dict[str, str]:
    """`environment` of a rank that reports on `descriptor`, and notes what it does in the file `activity`."""
    return {**environment, "MESHLOOM_REPORT_FD": str(descriptor), "MESHLOOM_ACTIVITY_FD": str(activity)}
