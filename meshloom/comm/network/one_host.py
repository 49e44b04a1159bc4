"""The check that all ranks of a group run on one host."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from meshloom.core.errors import CollectiveError, PeerLostError

# containers of one host have different names, and the same boot id
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def check_one_host(store: dist.Store, rank: int, members: Sequence[str], timeout: timedelta) -> None:
    """Raise `CollectiveError` if the members are on several hosts, `PeerLostError` if some do not come.

    All members call it together. store: used by this check alone. members: name of each in errors.
    """
    name = platform.node()
    boot = _BOOT.read_text().strip() if _BOOT.exists() else name
    store.set(str(rank), f"{boot} {name}")
    keys = [str(each) for each in range(len(members))]
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [member for each, member in zip(keys, members, strict=True) if not store.check([each])]
        raise PeerLostError(
            f"{members[rank]} waited {timeout.total_seconds():g} s for {', '.join(missing)} to join the group: {str(error).splitlines()[0]}"
        ) from error
    identities = [store.get(each).decode().split(" ", 1) for each in keys]
    if len({boot for boot, _ in identities}) > 1:
        places = ", ".join(
            f"{member} on {host}" for member, (_, host) in zip(members, identities, strict=True)
        )
        raise CollectiveError(
            f"The shm backend joins ranks of one host, and these are on several ({places}). Use the backend gloo, or meshloom's launcher."
        )
