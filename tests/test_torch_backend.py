"""Torch's own parallel tools give over shm what they give over Gloo."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from torch.utils import _pytree as pytree

from meshloom.comm.network.one_host import check_one_host
from meshloom.comm.shm import native_engine as shm
from meshloom.comm.shm.native_engine import why_not
from meshloom.core.errors import CollectiveError, DeviceError, MeshloomError, PeerLostError

pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(why_not()), reason=why_not() or "it is there")]


def _world() -> dict[str, Any]:
    from torch_backend_world import world  # imports all of torch's tools, which only the ranks need

    return world()


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_ranks(_world, 2)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tensor_parallel", "placements", "pipeline", "operations"])
def test_shm_equals_gloo(found: list[dict[str, Any]], name: str):
    """Bit by bit: the sum of two numbers does not depend on their order."""
    for rank in found:
        over_shm, over_gloo = map(pytree.tree_leaves, rank[name])
        assert len(over_shm) == len(over_gloo) > 0
        for one, other in zip(over_shm, over_gloo, strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_checkpoints_saved_over_one_are_loaded_over_the_other(found: list[dict[str, Any]]):
    for rank in found:
        assert len(rank["checkpoint"]) == 8
        assert all(torch.equal(loaded, saved) for loaded, saved in rank["checkpoint"])


def test_what_gloo_does_not_do(found: list[dict[str, Any]]):
    for rank, each in enumerate(found):
        assert each["beyond"] == [
            [1.5, 6.0], [1.5 + 3j], [3.0, 9.0], [True, True, False], [[2.0], [6.0]][rank], [2.0, 6.0], [[0.0] * (rank + 1), [1.0] * (rank + 1)],
            [5.0 - rank],
        ]  # fmt: skip


def _error_of(call: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as caught:
        call()
    assert isinstance(caught.value, MeshloomError)
    return str(caught.value)


def _mistakes() -> dict[str, Any]:
    import meshloom.comm.torch_backend  # noqa: F401

    dist.init_process_group("shm", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    found: dict[str, Any] = {
        "sizes": _error_of(lambda: dist.all_gather([torch.empty(3)] * 2, torch.empty(2))),
        "rows": _error_of(lambda: dist.all_to_all_single(torch.empty(3), torch.empty(3))),
        "sparse": _error_of(lambda: dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX)),
        "complex": _error_of(lambda: dist.reduce(torch.ones(1, dtype=torch.complex64), 0, dist.ReduceOp.MAX)),
    }
    if rank == 0:
        work = dist.barrier(async_op=True)
        began = time.monotonic()
        found["late"] = (
            _error_of(lambda: work.wait(timedelta(seconds=0.2))),
            not work.is_completed(),
            time.monotonic() - began > 0.19,
        )
        future = work.get_future()
        dist.group.WORLD.get_group_store().set("go", "")
        future.wait()  # completed by another thread
        found["late"] += (work.is_completed(), work.is_success())
    else:
        dist.group.WORLD.get_group_store().wait(["go"])
        dist.barrier()
    beside = dist.new_group(backend="cuda:shm,cpu:gloo")
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=beside)
    found["beside"] = (
        tensor.tolist(),
        type(beside._get_backend(torch.device("cpu"))).__name__,
        beside._get_backend(torch.device("cuda")) is beside,
    )
    only = dist.new_group(backend="cuda:shm")
    found["device"] = _error_of(lambda: dist.all_reduce(tensor, group=only))
    unequal = dist.all_reduce(torch.ones(2 + rank), group=dist.new_group(backend="shm"), async_op=True)
    found["future"] = _error_of(unequal.get_future().wait)
    found["calls"] = _error_of(
        lambda: dist.all_reduce(torch.ones(3)) if rank == 0 else dist.broadcast(torch.ones(2), 0)
    )
    return found


def test_mistakes_are_told_in_a_sentence_and_are_runtime_errors():
    first, second = on_ranks(_mistakes, 2)
    assert (
        first["sizes"]
        == "all_gather on rank 0 needs 2 tensors of float32[2], and was given float32[3], float32[3]."
    )
    assert (
        first["rows"] == "all_to_all: 3 rows do not divide equally over 2 ranks; say how many each one gets."
    )
    assert (
        first["sparse"]
        == "The shm backend reduces sparse tensors one by one and with SUM only; make them dense first."
    )
    assert first["complex"] == "Tensors of torch.complex64 cannot be reduced by max."
    assert first["late"] == (
        "barrier has reached its timeout of 0.2 s while other ranks had not started it.",
        True,
        True,
        True,
        True,
    )
    assert first["beside"] == second["beside"] == ([2.0, 2.0], "ProcessGroupGloo", True)
    assert (
        first["device"]
        == "This group has no backend for cpu tensors, it was created with 'cuda:shm'; add 'cpu:shm' to it."
    )
    for rank, each in enumerate((first, second)):
        own, other = (f"all_reduce sum of float32[{2 + either}]" for either in (rank, 1 - rank))
        assert each["future"].startswith(f"rank {rank} called {own} where rank {1 - rank} called {other}")
    calls = "all_reduce sum of float32[3]", "broadcast of float32[2] with root 0"
    assert first["calls"].startswith(f"rank 0 called {calls[0]} where rank 1 called {calls[1]}")
    assert second["calls"].startswith(f"rank 1 called {calls[1]} where rank 0 called {calls[0]}")


def test_ranks_of_several_hosts_are_refused():
    store = dist.HashStore()
    store.set("1", "another-boot node2")
    with pytest.raises(
        CollectiveError,
        match=r"several \(rank 0 on .+, rank 4 on node2\). Use the backend gloo, or meshloom's launcher.",
    ):
        check_one_host(store, 0, ["rank 0", "rank 4"], timedelta(seconds=5))


def test_a_rank_that_does_not_join_is_named():
    with pytest.raises(PeerLostError, match="rank 0 waited 0.1 s for rank 4 to join the group"):
        check_one_host(dist.HashStore(), 0, ["rank 0", "rank 4"], timedelta(seconds=0.1))


def test_without_the_compiled_engine_importing_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shm, "_engine", None)
    monkeypatch.delitem(sys.modules, "meshloom.comm.torch_backend", raising=False)
    with pytest.raises(
        DeviceError, match="The shm backend is not available: .* install a C compiler and Python's headers"
    ):
        importlib.import_module("meshloom.comm.torch_backend")
