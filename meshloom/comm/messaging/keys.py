"""The keys of one job: a pair for its servers and a pair for its workers, in two private files.

Whoever has the servers' file can be a server of the job, and whoever has the workers' file can join it as a
worker. Each side knows the other's public key, so workers connect only to servers of their job, and servers
accept only its workers. Keys are those of CURVE (Curve25519, Bernstein 2006), as text of 40 characters (Z85).
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import zmq

from meshloom.core.errors import EndpointError

_MOST_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class ServerKey:
    """The keys of a server: its own pair, and the public key of the job's workers."""

    public: str
    secret: str = field(repr=False)
    workers_public: str

    def __post_init__(self) -> None:
        _refuse_wrong_pair(self.public, self.secret)
        _refuse_no_key(self.workers_public)


@dataclass(frozen=True, kw_only=True)
class WorkerKey:
    """The keys of a worker: its own pair, and the public key of the job's servers."""

    public: str
    secret: str = field(repr=False)
    servers_public: str

    def __post_init__(self) -> None:
        _refuse_wrong_pair(self.public, self.secret)
        _refuse_no_key(self.servers_public)


def make_keys() -> tuple[ServerKey, WorkerKey]:
    """New keys, from the system's random numbers."""
    servers, servers_secret = _pair()
    workers, workers_secret = _pair()
    return (
        ServerKey(public=servers, secret=servers_secret, workers_public=workers),
        WorkerKey(public=workers, secret=workers_secret, servers_public=servers),
    )


def write_key(path: Path, key: ServerKey | WorkerKey) -> None:
    """Create the file, with mode 0600. Raises `EndpointError` if it exists or cannot be created."""
    content = {"meshloom": "server key" if isinstance(key, ServerKey) else "worker key", **asdict(key)}
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise EndpointError(
            f"The key file {path} cannot be created: {error.strerror}. Keys are never overwritten."
        ) from None
    with open(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)  # whatever the umask is
        file.write(json.dumps(content, indent=1) + "\n")


def read_server_key(path: Path) -> ServerKey:
    """Raises `EndpointError` if the file is not a server's key or others may read it."""
    return ServerKey(**_read(path, "server key", "workers_public"))


def read_worker_key(path: Path) -> WorkerKey:
    """Raises `EndpointError` if the file is not a worker's key or others may read it."""
    return WorkerKey(**_read(path, "worker key", "servers_public"))


def _read(path: Path, what: str, others: str) -> dict[str, str]:
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise EndpointError(f"The key {path} is not a file.")
            if found.st_mode & 0o077:
                raise EndpointError(
                    f"The key file {path} can be read or written by others (mode {stat.S_IMODE(found.st_mode):04o}). Use chmod 600 {path}."
                )
            text = file.read(_MOST_BYTES)
    except OSError as error:
        raise EndpointError(f"The key file {path} cannot be read: {error.strerror}.") from None
    try:
        content: Any = json.loads(text)
    except ValueError:
        content = None
    names = {"meshloom", "public", "secret", others}
    is_key = isinstance(content, dict) and content.keys() == names
    if not is_key or not all(isinstance(value, str) for value in content.values()):
        raise EndpointError(f"{path} is not a {what} of meshloom.")
    if (kind := content.pop("meshloom")) != what:
        raise EndpointError(f"{path} is a {kind}, and a {what} is needed.")
    return content


def _pair() -> tuple[str, str]:
    """Public and secret."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _refuse_wrong_pair(public: str, secret: str) -> None:
    _refuse_no_key(public)
    _refuse_no_key(secret)
    if zmq.curve_public(secret.encode()) != public.encode():
        raise EndpointError(
            f"The public key {public} does not belong to its secret key: the key file is damaged."
        )


def _refuse_no_key(text: str) -> None:
    try:
        # any 32 bytes are a secret key
        valid = len(text) == 40 and len(zmq.curve_public(text.encode("ascii"))) == 40
    except (zmq.ZMQError, UnicodeEncodeError):
        valid = False
    if not valid:
        raise EndpointError("A key is 40 characters of Z85, and this one is not: the key file is damaged.")
