"""What PyTorch's own suite for backends passes with Gloo, it passes with shm; but for tests of Gloo
itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshloom.comm.shm.native_engine import why_not

pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(why_not()), reason=why_not() or "it is there")]

SUITE = Path(__file__).parent / "conformance" / "suite.py"

_BY_NAME = "torch.distributed.monitored_barrier refuses every backend but Gloo by its name"
OF_GLOO_ITSELF = {
    "test_monitored_barrier_gloo": _BY_NAME,
    "test_monitored_barrier_gloo_subgroup": _BY_NAME,
    "test_monitored_barrier_failure_order": _BY_NAME,
    "test_monitored_barrier_wait_all_ranks": _BY_NAME,
    "test_monitored_barrier_gloo_rank_0_timeout": "asks for the words of Gloo's own monitored barrier",
}

# One of each kind: reductions, movements, messages, objects, sub-groups, timeouts, DDP with and without
# futures.
COVERING = [
    "test_all_gather", "test_all_gather_coalesced_complex", "test_all_gather_object_subgroup", "test_all_reduce_coalesced_sum",
    "test_all_reduce_complex_unsupported_ops", "test_all_reduce_product", "test_all_reduce_sum_async", "test_all_reduce_sum_complex",
    "test_barrier_full_group", "test_barrier_timeout_full_group", "test_batch_isend_irecv_gloo_tags", "test_broadcast_full_group",
    "test_destroy_group", "test_gather_full_group", "test_get_backend", "test_get_future", "test_isend", "test_reduce_max", "test_scatter_complex",
    "test_send_recv_any_source", "test_sparse_all_reduce_sum", "test_DistributedDataParallelCPU_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook", "test_ddp_logging_data_cpu", "test_static_graph_api_cpu",
]  # fmt: skip


def _outcomes(backend: str, num_ranks: int, names: list[str], directory: Path) -> dict[str, str]:
    out = directory / f"{backend}.json"
    command = [
        sys.executable,
        str(SUITE),
        "--backend",
        backend,
        "--ranks",
        str(num_ranks),
        "--out",
        str(out),
        *names,
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def test_a_covering_part_of_the_suite(tmp_path: Path):
    """All of these pass with Gloo, too: `test_all_of_the_suite` runs them."""
    assert _outcomes("shm", 2, COVERING, tmp_path) == dict.fromkeys(COVERING, "passed")


def _compare(num_ranks: int, names: list[str], directory: Path) -> int:
    over_gloo, over_shm = (_outcomes(backend, num_ranks, names, directory) for backend in ("gloo", "shm"))
    passing = [
        name for name, outcome in over_gloo.items() if outcome == "passed" and name not in OF_GLOO_ITSELF
    ]
    wrong = {name: over_shm[name] for name in passing if over_shm[name] != "passed"}
    assert not wrong, "\n".join(f"{name}: {outcome}" for name, outcome in wrong.items())
    assert "passed" not in {over_shm.get(name) for name in OF_GLOO_ITSELF}, (
        "A test of the list passes: take it off."
    )
    return len(passing)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_all_of_the_suite(tmp_path: Path, num_ranks: int):
    """About 90 tests run on two ranks, 110 and more on three and four, where there are sub-groups."""
    assert _compare(num_ranks, [], tmp_path) >= 80
