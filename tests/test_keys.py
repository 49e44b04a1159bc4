"""Key files: private, whole, and for what they were made for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from meshloom.comm.messaging.keys import (
    ServerKey,
    WorkerKey,
    make_keys,
    read_server_key,
    read_worker_key,
    write_key,
)
from meshloom.core.errors import EndpointError


def test_keys_are_read_as_they_were_written(tmp_path: Path):
    server, worker = make_keys()
    write_key(tmp_path / "server.key", server)
    write_key(tmp_path / "worker.key", worker)
    assert read_server_key(tmp_path / "server.key") == server
    assert read_worker_key(tmp_path / "worker.key") == worker
    assert server.workers_public == worker.public and worker.servers_public == server.public
    assert len({server.public, server.secret, worker.public, worker.secret}) == 4


def test_every_job_has_other_keys():
    assert len({key.secret for _ in range(5) for key in make_keys()}) == 10


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
def test_files_are_private_whatever_the_umask(tmp_path: Path, umask: int):
    before = os.umask(umask)
    try:
        write_key(tmp_path / "key", make_keys()[0])
    finally:
        os.umask(before)
    assert (tmp_path / "key").stat().st_mode & 0o7777 == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610, 0o666])
def test_files_open_to_others_are_refused(tmp_path: Path, mode: int):
    path = tmp_path / "key"
    write_key(path, make_keys()[1])
    path.chmod(mode)
    with pytest.raises(EndpointError, match=f"mode {mode:04o}.*chmod 600"):
        read_worker_key(path)


def test_a_key_is_never_written_over_another(tmp_path: Path):
    path = tmp_path / "key"
    write_key(path, make_keys()[0])
    before = path.read_bytes()
    with pytest.raises(EndpointError, match="cannot be created"):
        write_key(path, make_keys()[0])
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EndpointError, match="cannot be created"):
        write_key(tmp_path / "link", make_keys()[0])
    assert path.read_bytes() == before and not (tmp_path / "elsewhere").exists()


def test_a_key_of_the_other_side_is_refused(tmp_path: Path):
    server, worker = make_keys()
    write_key(tmp_path / "server.key", server)
    write_key(tmp_path / "worker.key", worker)
    with pytest.raises(EndpointError, match="is not a worker key"):
        read_worker_key(tmp_path / "server.key")
    with pytest.raises(EndpointError, match="is not a server key"):
        read_server_key(tmp_path / "worker.key")


def test_damaged_files_are_refused(tmp_path: Path):
    path = tmp_path / "key"
    write_key(path, make_keys()[1])
    whole = path.read_text()
    content = json.loads(whole)
    other = make_keys()[1]
    broken = [
        "",
        "\0" * 5000,
        whole[: len(whole) // 2],
        "[]",
        "3",
        json.dumps({**content, "public": other.public}),
        json.dumps({**content, "secret": content["secret"][:-1]}),
        json.dumps({**content, "servers_public": "\u00e9" * 40}),
        json.dumps({**content, "servers_public": '"' * 40}),
        json.dumps({**content, "servers_public": 3}),
        json.dumps({**content, "more": ""}),
    ]
    for text in broken:
        path.write_text(text)
        with pytest.raises(EndpointError):
            read_worker_key(path)
    path.unlink()
    with pytest.raises(EndpointError, match="cannot be read"):
        read_worker_key(path)
    with pytest.raises(EndpointError):
        read_worker_key(tmp_path)


def test_secrets_are_not_printed():
    server, worker = make_keys()
    for key in (server, worker):
        assert (
            isinstance(key, ServerKey | WorkerKey) and key.secret not in repr(key) and key.public in repr(key)
        )
