"""A store whose values ranks sign, so that they accept only each other's.

A store listens on a port, and whoever can reach the port can read and write. Each rank first writes a nonce.
The key of all further signatures is derived from the secret and all nonces, so a signature of another run, or
of another group of this run, is not valid here (HMAC, RFC 2104, with SHA-256).
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
    """An exchange of texts between the ranks of one group, one under each name.

    store: used by this exchange alone. members: name of each rank in errors.
    secret: known to all ranks; b"": none, and signatures only tell groups apart.
    timeout: how long a rank waits for another; None: the store's.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        members: Sequence[str],
        secret: bytes = b"",
        timeout: timedelta | None = None,
    ) -> None:
        self._store, self._rank, self._members = store, rank, tuple(members)
        self._secret, self._timeout = secret, timeout
        self._key: bytes | None = None  # once all nonces are known

    def key(self, use: str) -> bytes:
        """The key of these ranks for one use; b"" without a secret. All ranks call it together."""
        return hmac.digest(self._agreed_key(), use.encode(), "sha256") if self._secret else b""

    def all_gather(self, name: str, value: str) -> list[str]:
        """Write `value` under `name`; the values of all ranks, in rank order. All ranks call it together.

        Raises `CollectiveError` for a value that its rank has not signed, and the store's `RuntimeError` if a
        rank writes none in time.
        """
        return self._gather(self._agreed_key(), name, value)

    def have_written(self, name: str) -> list[bool]:
        """Whether each rank has written a value under `name`; False if the store does not reply."""
        return [_is_there(self._store, f"{name}/{rank}") for rank in range(len(self._members))]

    def _agreed_key(self) -> bytes:
        if self._key is None:
            nonces = self._gather(self._secret, "first", secrets.token_hex(16))
            self._key = hmac.digest(self._secret, json.dumps(nonces).encode(), "sha256")
        return self._key

    def _gather(self, key: bytes, name: str, value: str) -> list[str]:
        names = [f"{name}/{rank}" for rank in range(len(self._members))]
        self._store.set(names[self._rank], _signature(key, names[self._rank], value) + value)
        self._store.wait(names, self._timeout) if self._timeout is not None else self._store.wait(names)
        return [
            value if rank == self._rank else self._verified(key, each, rank)
            for rank, each in enumerate(names)
        ]

    def _verified(self, key: bytes, name: str, rank: int) -> str:
        text = self._store.get(name).decode(errors="replace")
        tag, value = text[:_TAG], text[_TAG:]
        if not hmac.compare_digest(tag.encode(), _signature(key, name, value).encode()):
            raise CollectiveError(
                f"{self._members[self._rank]} rejects the value of {name} in the ranks' store: {self._members[rank]} has not signed it. "
                "Either another program writes into the store, or the ranks have different secrets: set MESHLOOM_SECRET for all of them or for none."
            )
        return value


def _signature(key: bytes, name: str, value: str) -> str:
    return hmac.digest(key, json.dumps([name, value]).encode(), "sha256").hex()


def _is_there(store: dist.Store, key: str) -> bool:
    try:
        return store.check([key])
    except RuntimeError:
        return False
