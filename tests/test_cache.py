"""What is kept on disk is believed where everything that it depends on is equal, and the file is whole and
this user's; else it is as if it were not there."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from meshloom.core.cache import Cache

PARTS = {"model": "a", "loss": "b"}


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "kept")


def only_file(cache: Cache) -> Path:
    (found,) = cache.directory.iterdir()
    return found


def test_what_was_put_is_found_again_by_this_user_alone(cache: Cache):
    assert cache.get("reading", "a loss", PARTS).why == "no earlier run has stored it"
    assert cache.put("reading", "a loss", PARTS, b"content") is None
    assert cache.get("reading", "a loss", PARTS).content == b"content"
    assert (
        cache.directory.stat().st_mode & 0o777 == 0o700 and only_file(cache).stat().st_mode & 0o777 == 0o600
    )


def test_a_miss_says_which_part_is_another_one(cache: Cache):
    cache.put("reading", "a loss", PARTS, b"content")
    found = cache.get("reading", "a loss", {**PARTS, "model": "another"})
    assert (found.content, found.why, found.refused) == (None, "changed since an earlier run: model", False)


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def of_something_else(path: Path) -> None:
    other = Cache(path.parent.parent / "other")
    other.put("reading", "a loss", {"model": "c"}, b"something else")
    path.write_bytes(only_file(other).read_bytes())


def for_all_to_write(path: Path) -> None:
    path.chmod(0o666)


def elsewhere(path: Path) -> None:
    path.rename(path.parent.parent / "there")
    path.symlink_to(path.parent.parent / "there")


@pytest.mark.parametrize(
    "spoil", [damaged, truncated, emptied, of_something_else, for_all_to_write, elsewhere]
)
def test_a_file_that_is_not_ours_and_whole_is_not_believed_and_goes(spoil, cache: Cache):
    cache.put("reading", "a loss", PARTS, b"content")
    spoil(only_file(cache))
    found = cache.get("reading", "a loss", PARTS)
    assert found.content is None and found.refused and "is not trusted" in found.why
    assert cache.put("reading", "a loss", PARTS, b"content") is None
    assert cache.get("reading", "a loss", PARTS).content == b"content"


def test_a_directory_of_another_user_or_open_to_others_is_not_believed(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
):
    cache.put("reading", "a loss", PARTS, b"content")
    own = os.geteuid()
    with monkeypatch.context() as patched:
        patched.setattr("os.geteuid", lambda: own + 1)
        assert "belongs to another user" in cache.get("reading", "a loss", PARTS).why
        assert "belongs to another user" in (cache.put("reading", "a loss", PARTS, b"content") or "")
    cache.directory.chmod(0o777)
    assert "others may write" in cache.get("reading", "a loss", PARTS).why
    cache.directory.chmod(0o700)
    assert cache.get("reading", "a loss", PARTS).content == b"content"


def test_where_nothing_can_be_written_it_says_so(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
):
    """A file where the directory should be; a full disk, after which nothing is left of what was written."""
    (tmp_path / "file").write_text("")
    inside = Cache(tmp_path / "file" / "kept")
    assert "cannot be written (Not a directory)" in (inside.put("reading", "a loss", PARTS, b"content") or "")
    assert inside.get("reading", "a loss", PARTS).content is None

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert "cannot be written (No space left on device)" in (
        cache.put("reading", "a loss", PARTS, b"content") or ""
    )
    assert list(cache.directory.iterdir()) == []


def test_the_least_used_goes_when_there_is_no_more_room(tmp_path: Path):
    cache = Cache(tmp_path / "kept", max_bytes=1500)
    for number, loss in enumerate(("first", "second", "third")):
        cache.put("reading", loss, {"loss": loss}, bytes(300))
        for path in cache.directory.iterdir():
            os.utime(path, (number, number)) if path.stat().st_mtime > 1000 else None
    cache.get("reading", "first", {"loss": "first"})  # now it is the newest
    cache.put("reading", "fourth", {"loss": "fourth"}, bytes(300))
    there = [
        loss
        for loss in ("first", "second", "third", "fourth")
        if cache.get("reading", loss, {"loss": loss}).content
    ]
    assert there == ["first", "third", "fourth"]
    assert "more than the limit of 1500" in (cache.put("reading", "large", PARTS, bytes(2000)) or "")


def test_several_may_write_and_read_at_once(cache: Cache):
    wrong: list[object] = []

    def work() -> None:
        for _ in range(30):
            wrong.extend(filter(None, [cache.put("reading", "a loss", PARTS, b"content")]))
            found = cache.get("reading", "a loss", PARTS)
            wrong.extend([found] if found.content != b"content" else [])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong and only_file(cache)
