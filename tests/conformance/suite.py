"""Runs PyTorch's own suite for backends of torch.distributed against one backend, and says what became of
each test.

    python tests/conformance/suite.py --backend shm --ranks 3 --out shm3.json
    python tests/conformance/suite.py --backend gloo --ranks 2 test_all_reduce_sum test_barrier

The suite (`torch.testing._internal.distributed.distributed_test`, in the wheel; it needs `expecttest`) starts
processes anew for every test, which costs seconds each. Here all tests are imported once, and each test's
ranks are forked from that. What the suite decides by the backend's name (which tests to skip, which models to
build) it decides for any backend as it does for Gloo.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# What a rank finds when it imports the suite; "file://" because one test reads the file's name and skips
# otherwise.
ENVIRONMENT = {
    "BACKEND": "gloo",
    "INIT_METHOD": "file://",
    "OMP_NUM_THREADS": "1",
    "MASTER_ADDR": "127.0.0.1",
    "TORCH_SHOW_CPP_STACKTRACES": "0",
}
TEST_SECONDS = 60.0  # a test that takes longer hangs
FORK = multiprocessing.get_context("fork")


class TakenForGloo(str):
    """The name of a backend, which also answers yes to "gloo"."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def run(backend: str, num_ranks: int, names: list[str]) -> dict[str, str]:
    """ "passed", "skipped: ..." or "failed: ..." for each test of the suite, or for those in `names`."""
    os.environ.update(ENVIRONMENT, WORLD_SIZE=str(num_ranks))
    suite = _suite(backend, num_ranks)
    outcomes: dict[str, str] = {}
    for name in names or [name for name in dir(suite) if name.startswith("test_")]:
        function = getattr(suite, name)
        if getattr(function, "__unittest_skip__", False):
            outcomes[name] = f"skipped: {function.__unittest_skip_why__}"
            continue
        began = time.monotonic()
        outcomes[name] = _on_ranks(suite, name, num_ranks)
        print(f"{time.monotonic() - began:6.1f} s  {name}: {outcomes[name]}", file=sys.stderr, flush=True)
    return outcomes


def _suite(backend: str, num_ranks: int) -> Any:
    """The suite's class, with `backend` in the place of Gloo."""
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    if num_ranks > 2:  # tests of the groups [1, 2] ask for eight ranks, and need three
        importlib.import_module("torch.testing._internal.common_distributed").skip_if_small_worldsize = (
            lambda test: test
        )
    tests = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    if backend == "shm":
        importlib.import_module("meshloom.comm.torch_backend")
    if backend != "gloo":
        tests.BACKEND = TakenForGloo(backend)
    return type("Suite", (tests.TestDistBackend, tests.DistributedTest._DistTestBase), {})


def _on_ranks(suite: Any, name: str, num_ranks: int) -> str:
    """Fork the ranks of one test and put together what they say."""
    with tempfile.TemporaryDirectory() as directory:
        for each in ("barrier", "test_dir", "init_dir"):
            Path(directory, each).mkdir()
        barrier = FORK.Barrier(num_ranks)
        ends: dict[Connection, int] = {}
        processes = []
        for rank in range(num_ranks):
            here, there = FORK.Pipe(duplex=False)
            process = FORK.Process(
                target=_rank, args=(there, suite, name, rank, num_ranks, directory, barrier), daemon=True
            )
            process.start()
            there.close()
            ends[here] = rank
            processes.append(process)
        try:
            return _joined(_said(ends, time.monotonic() + TEST_SECONDS))
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
            for end in ends:
                end.close()


def _said(ends: dict[Connection, int], deadline: float) -> dict[int, str]:
    """What each rank says; once one fails, the others have a second."""
    said: dict[int, str] = {}
    open_ends = list(ends)
    while open_ends:
        ready = wait(open_ends, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for end in ready:
            try:
                said[ends[end]] = end.recv()
            except EOFError:
                said[ends[end]] = "failed: died"
            open_ends.remove(end)
            if said[ends[end]].startswith("failed"):
                deadline = min(deadline, time.monotonic() + 1.0)
    return said | {ends[end]: "failed: has not returned" for end in open_ends}


def _joined(said: dict[int, str]) -> str:
    failed = [
        f"rank {rank} {text.removeprefix('failed: ')}"
        for rank, text in sorted(said.items())
        if text.startswith("failed")
    ]
    if failed:
        return "failed: " + "\n".join(failed)
    # A rank outside a test's group may skip what the others run.
    return next((text for text in said.values() if text == "passed"), said[0])


def _rank(
    end: Connection, suite: Any, name: str, rank: int, num_ranks: int, directory: str, barrier: Any
) -> None:
    """One rank's test, in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    os.environ.update(TEMP_DIR=directory, TMPDIR=directory, RANK=str(rank))
    tempfile.tempdir = directory
    try:
        end.send(_outcome(suite, name, rank, num_ranks, directory, barrier))
    finally:
        os._exit(0)  # finalization would wait for operations that other ranks will not join


def _outcome(suite: Any, name: str, rank: int, num_ranks: int, directory: str, barrier: Any) -> str:
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.common_utils import set_rng_seed

    tests = sys.modules["torch.testing._internal.distributed.distributed_test"]
    tests.INIT_METHOD = f"file://{directory}/init_dir/shared_init_file"
    # theirs looks at files every 0.1 s
    tests.Barrier.sync = classmethod(lambda cls, wait_for=None, timeout=10: barrier.wait(timeout))
    case = suite(name)
    case.rank, case.file_name = rank, f"{directory}/store"
    warnings.simplefilter("ignore")
    try:
        timeout = timedelta(seconds=tests.CUSTOM_PG_TIMEOUT.get(name, tests.default_pg_timeout))
        dist.init_process_group(
            init_method=case.init_method,
            backend=str.__str__(tests.BACKEND),
            world_size=num_ranks,
            rank=rank,
            timeout=timeout,
        )
        barrier.wait(10)
        set_rng_seed()
        getattr(case, name)()
        barrier.wait(10)
        if dist.is_initialized():
            dist.destroy_process_group()
    except unittest.SkipTest as skipped:
        return f"skipped: {skipped}"
    except SystemExit as left:
        return f"skipped: {next((skip.message for skip in TEST_SKIPS.values() if skip.exit_code == left.code), left.code)}"
    except BaseException:
        return f"failed: {traceback.format_exc()}"
    return "passed"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="shm", help="shm, gloo, or another that torch knows")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where to write the outcomes, as JSON")
    parser.add_argument("tests", nargs="*", help="which tests; all of them if none is named")
    request = parser.parse_args()
    outcomes = run(request.backend, request.ranks, request.tests)
    if request.out:
        request.out.write_text(json.dumps(outcomes, indent=1))
    count = {
        kind: sum(text.startswith(kind) for text in outcomes.values())
        for kind in ("passed", "skipped", "failed")
    }
    print(
        f"{request.backend} on {request.ranks} ranks: {count['passed']} passed, {count['skipped']} skipped, {count['failed']} failed"
    )


if __name__ == "__main__":
    main()
