"""A store in which ranks believe each other and nobody else: what is said there is signed with a secret that
is not in it.

A store listens on a port, and whoever reaches the port can read and write in it. Each rank first says a
number that nobody has used before. The key of all that follows is made of the secret and all ranks' numbers,
so that what was said in another run, or in another group of this one, is no valid signature here (HMAC, RFC
2104, with SHA-256).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from meshloom.core.errors import CollectiveError

_TAG = hashlib.sha256().digest_size * 2  # characters


class SignedStore:
    """What the ranks of one group say to each other, once under each name.

    store: for this alone. members: what to call each rank in errors. secret: what all of them know; b"":
    nothing, so that signatures only keep groups apart. timeout: how long a rank waits for another; None: as
    the store does.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        members: Sequence[str],
        secret: bytes = b"",
        timeout: timedelta | None = None,
    ) -> None:
        self._store, self._rank, self._members, self._secret, self._timeout = (
            store,
            rank,
            tuple(members),
            secret,
            timeout,
        )
        self._key: bytes | None = None  # once all ranks' numbers are known

    def key(self, use: str) -> bytes:
        """A key that these ranks have for one use; b"" without a secret. Exchanges the numbers, if that was
        not done, as `all_say` does."""
        return hmac.digest(self._agreed_key(), use.encode(), "sha256") if self._secret else b""

    def all_say(self, name: str, value: str) -> list[str]:
        """What each rank says under `name`, in order of ranks. All ranks call it together.

        Raises `CollectiveError` if one has not said what stands under its name, `RuntimeError` of the store
        if one says nothing.
        """
        return self._exchange(self._agreed_key(), name, value)

    def have_said(self, name: str) -> list[bool]:
        """Whether there is something under `name`, by rank; False too where the store does not answer."""
        return [_is_there(self._store, f"{name}/{rank}") for rank in range(len(self._members))]

    def _agreed_key(self) -> bytes:
        if self._key is None:
            numbers = self._exchange(self._secret, "first", secrets.token_hex(16))
            self._key = hmac.digest(self._secret, json.dumps(numbers).encode(), "sha256")
        return self._key

    def _exchange(self, key: bytes, name: str, value: str) -> list[str]:
        names = [f"{name}/{rank}" for rank in range(len(self._members))]
        self._store.set(names[self._rank], _signature(key, names[self._rank], value) + value)
        self._store.wait(names, self._timeout) if self._timeout is not None else self._store.wait(names)
        return [
            value if rank == self._rank else self._heard(key, each, rank) for rank, each in enumerate(names)
        ]

    def _heard(self, key: bytes, name: str, rank: int) -> str:
        text = self._store.get(name).decode(errors="replace")
        tag, value = text[:_TAG], text[_TAG:]
        if not hmac.compare_digest(tag.encode(), _signature(key, name, value).encode()):
            raise CollectiveError(
                f"{self._members[self._rank]} does not believe what stands under {name} in the ranks' store: {self._members[rank]} has not signed it. "
                "Either another program writes into the store, or the ranks were given different secrets: set MESHLOOM_SECRET for all of them or for none."
            )
        return value


def _signature(key: bytes, name: str, value: str) -> str:
    return hmac.digest(key, json.dumps([name, value]).encode(), "sha256").hex()


def _is_there(store: dist.Store, key: str) -> bool:
    try:
        return store.check([key])
    except RuntimeError:
        return False
