"""What stands in a store is believed only if a rank has signed it, and memory is opened only if it is this
user's and what it should be."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from thread_groups import on_threads

from meshloom.comm import objects as values
from meshloom.comm.network.signed_store import SignedStore
from meshloom.comm.shm.segments import PAGE, create_file, open_file
from meshloom.comm.shm.shared_memory import ShmGroup
from meshloom.comm.simulated import SimulatedGroup, simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.errors import CollectiveError, DeviceError
from meshloom.launch.environment import launched_secret

MEMBERS = ["rank 0 (dp=0)", "rank 1 (dp=1)"]
SECRET = b"known to the ranks alone"
NOBODY = 65534
SOON = timedelta(seconds=5)


def said(store: dist.Store, secrets: tuple[bytes, bytes] = (SECRET, SECRET)) -> list[Any]:
    """What two ranks hear, or the error that they get."""

    def say(rank: int) -> Any:
        try:
            return SignedStore(store, rank, MEMBERS, secrets[rank], SOON).all_gather(
                "place", f"here is {rank}"
            )
        except CollectiveError as error:
            return str(error)

    return on_threads([lambda rank=rank: say(rank) for rank in range(2)])


@pytest.mark.parametrize("secret", [SECRET, b""], ids=["secret", "none"])
def test_all_hear_what_each_says(secret: bytes) -> None:
    assert said(dist.HashStore(), (secret, secret)) == [["here is 0", "here is 1"]] * 2


def test_ranks_of_different_secrets_do_not_believe_each_other() -> None:
    for heard in said(dist.HashStore(), (SECRET, b"another one")):
        assert "has not signed it" in heard and "MESHLOOM_SECRET" in heard


class Overwritten(dist.Store):
    """A store in which another program puts its own values in place of those of some keys."""

    def __init__(self, store: dist.Store, values: dict[str, bytes]) -> None:
        super().__init__()
        self._store, self._values = store, values

    def set(self, key: str, value: str) -> None:  # type: ignore[override]
        self._store.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta = SOON) -> None:  # type: ignore[override]
        self._store.wait(keys, timeout)

    def get(self, key: str) -> bytes:
        found = self._store.get(key)
        return self._values.get(key, found)


def test_a_changed_word_is_not_believed() -> None:
    store = dist.HashStore()
    heard: list[Any] = []

    def rank_0() -> None:
        changed = Overwritten(store, {"place/1": b"0" * 64 + b"there"})
        with pytest.raises(
            CollectiveError,
            match=r"rank 0 \(dp=0\) rejects the value of place/1 .*rank 1 \(dp=1\) has not signed it",
        ):
            SignedStore(changed, 0, MEMBERS, SECRET, SOON).all_gather("place", "here")

    on_threads(
        [
            rank_0,
            lambda: heard.append(
                SignedStore(store, 1, MEMBERS, SECRET, SOON).all_gather("place", "here is 1")
            ),
        ]
    )
    assert heard == [["here", "here is 1"]]  # only rank 0 was lied to


def test_what_was_said_in_an_earlier_run_is_not_believed_again() -> None:
    """A secret that the user has set is the same in every run, so a signature of last time must not be one
    today."""
    earlier = dist.HashStore()
    said(earlier)
    replayed = {key: earlier.get(key) for key in ("first/1", "place/1")}
    today = dist.HashStore()
    today.set("first/1", replayed["first/1"])
    today.set("place/1", replayed["place/1"])
    with pytest.raises(CollectiveError, match="has not signed it"):
        SignedStore(today, 0, MEMBERS, SECRET, SOON).all_gather("place", "here is 0")


def test_keys_of_groups_and_uses_differ() -> None:
    def keys(store: dist.Store, rank: int) -> tuple[bytes, bytes]:
        signed = SignedStore(store, rank, MEMBERS, SECRET, SOON)
        return signed.key("groups"), signed.key("other")

    one, two = dist.HashStore(), dist.HashStore()
    first = on_threads([lambda rank=rank: keys(one, rank) for rank in range(2)])
    second = on_threads([lambda rank=rank: keys(two, rank) for rank in range(2)])
    assert first[0] == first[1] and second[0] == second[1]
    assert len({*first[0], *second[0]}) == 4


def test_a_secret_that_can_be_guessed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHLOOM_SECRET", "swordfish")
    with pytest.raises(DeviceError, match="has 9 characters and can be guessed: give 16 or more"):
        launched_secret()
    monkeypatch.setenv("MESHLOOM_SECRET", "a" * 32)
    assert launched_secret() == b"a" * 32
    monkeypatch.delenv("MESHLOOM_SECRET")
    assert launched_secret() == b""


def _calls_home(marks: str) -> None:
    Path(marks).write_text("unpickled")


class _Evil:
    def __init__(self, marks: str) -> None:
        self._marks = marks

    def __reduce__(self) -> Any:
        return _calls_home, (self._marks,)


def test_a_batch_that_no_rank_has_signed_is_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches travel pickled, and what is unpickled runs."""
    groups = simulated_groups(2)
    monkeypatch.setattr(SimulatedGroup, "secret", property(lambda self: SECRET))
    assert in_turns(
        [partial(values.scatter_objects, group, ["a", "b"] if group.rank == 0 else None) for group in groups]
    ) == ["a", "b"]
    marks = tmp_path / "marks"
    sign = values._signed
    monkeypatch.setattr(
        values,
        "_signed",
        lambda secret, source, rank, value: sign(b"guessed" if rank else secret, source, rank, value),
    )
    with pytest.raises(
        CollectiveError, match="What rank 1 of a group received from rank 0 was not signed by it"
    ):
        in_turns(
            [
                partial(values.scatter_objects, group, [None, _Evil(str(marks))] if group.rank == 0 else None)
                for group in simulated_groups(2)
            ]
        )
    assert not marks.exists()


@contextmanager
def as_another_user(make: Callable[[], str]) -> Iterator[tuple[int, str]]:
    """A process of another user that has called `make`: its number, and what that returned. Where only root
    can be another user, who is not root is told that it is."""
    ready, told = os.pipe()
    end, go = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            os.close(go)
            os.write(told, make().encode())
            os.read(end, 1)
        finally:
            os._exit(0)
    try:
        os.close(told)
        os.close(end)
        yield child, os.read(ready, 1000).decode()
    finally:
        os.close(go)
        os.close(ready)
        os.waitpid(child, 0)


@pytest.fixture
def another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not root cannot become another user: so it is this process that looks for files of another
    one."""
    if os.getuid():
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


def _memory_file(num_bytes: int = PAGE) -> str:
    descriptor = os.memfd_create("meshloom", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    os.fchmod(descriptor, 0o600)
    return str(descriptor)


@pytest.mark.processes
def test_memory_of_another_user_is_not_opened(another: None) -> None:
    """Another user's process said through the store, which listens on loopback, that it was a rank, and
    root's ranks mapped its memory."""
    with (
        as_another_user(_memory_file) as (process, number),
        pytest.raises(PermissionError, match="belongs to another user"),
    ):
        open_file(process, int(number), PAGE)


@pytest.mark.processes
def test_a_group_with_a_rank_of_another_user_is_refused(another: None) -> None:
    """The whole way: whoever knows all that is said (here: there is no secret) still has no memory that a
    rank maps."""
    store = dist.HashStore()
    met: list[str] = []
    with as_another_user(lambda: _memory_file(1 << 34)) as (process, number):

        def intruder() -> None:
            signed = SignedStore(store, 1, MEMBERS, b"", SOON)
            signed.all_gather("process", str(process))
            signed.all_gather("files", number)
            met.extend(signed.all_gather("problems", ""))

        thread = threading.Thread(target=intruder)
        thread.start()
        with pytest.raises(CollectiveError, match="The ranks cannot share memory"):
            ShmGroup(store, 0, 2, MEMBERS, timeout=SOON)
        thread.join()
    assert "another user" in met[0]


@pytest.mark.processes
def test_a_file_of_this_user_that_is_no_shared_memory_is_not_opened(tmp_path: Path) -> None:
    """A descriptor of a process says nothing of what the file is: one of this user's own files would have
    been mapped and written."""
    own = tmp_path / "thesis.txt"
    own.write_bytes(b"x" * PAGE)
    own.chmod(0o600)
    descriptor = os.open(own, os.O_RDONLY)
    try:
        with pytest.raises(PermissionError, match="is not shared memory"):
            open_file(os.getpid(), descriptor, PAGE)
    finally:
        os.close(descriptor)


def test_memory_of_another_size_or_mode_is_not_opened() -> None:
    made = number = create_file(3 * PAGE, backed=False)
    try:
        os.close(open_file(os.getpid(), number, 3 * PAGE))
        with pytest.raises(PermissionError, match=f"{3 * PAGE} bytes; .* {2 * PAGE} bytes were expected"):
            open_file(os.getpid(), number, 2 * PAGE)
        with pytest.raises(PermissionError):  # who shrank it would kill who reads there
            os.ftruncate(made, PAGE)
        os.fchmod(made, 0o666)
        with pytest.raises(PermissionError, match="mode 0666"):
            open_file(os.getpid(), number, 3 * PAGE)
    finally:
        os.close(made)
    unsealed = int(_memory_file())
    try:
        with pytest.raises(PermissionError, match="can change its size"):
            open_file(os.getpid(), unsealed, PAGE)
    finally:
        os.close(unsealed)
