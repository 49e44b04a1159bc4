"""What ranks talk through follows from where they run, is said in one line, and can be chosen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from launch_scripts import run, write_script
from thread_groups import on_threads

from meshloom.cli.main import main
from meshloom.comm.network.signed_store import SignedStore
from meshloom.core.errors import DeviceError
from meshloom.core.mesh import Mesh
from meshloom.launch.environment import launched_transport
from meshloom.launch.opening import open_world
from meshloom.launch.transport import Transports, agreed_transports, host_identity

MACHINES = "through shared memory on each of 2 machines and over Gloo between them"


@pytest.mark.parametrize(
    ("hosts", "mesh", "text", "layers"),
    [
        ("aaaa", Mesh(dp=4), "communicating through shared memory", {"dp": [((0, 1, 2, 3),)]}),
        (
            "aaaa",
            Mesh(dp=2, tp=2),
            "communicating through shared memory",
            {"dp": [((0, 1),)] * 2, "tp": [((0, 1),)] * 2},
        ),
        ("aabb", Mesh(dp=4), f"communicating {MACHINES}", {"dp": [((0, 1), (2, 3))]}),
        ("abab", Mesh(dp=4), f"communicating {MACHINES}", {"dp": [((0, 2), (1, 3))]}),
        (
            "aabb",
            Mesh(dp=2, tp=2),
            "communicating along dp over Gloo, along tp through shared memory",
            {"dp": [None] * 2, "tp": [((0, 1),)] * 2},
        ),
        (
            "aaaabbbb",
            Mesh(dp=2, tp=2, pp=2),
            "communicating along dp through shared memory, along pp over Gloo, along tp through shared memory",
            {},
        ),
        ("abcd", Mesh(dp=4), "communicating over Gloo", {"dp": [None]}),
        (
            "aaab",
            Mesh(dp=4),
            "communicating over Gloo (1 rank on 1 machine and 3 ranks on 1 machine)",
            {"dp": [None]},
        ),
        (
            "aaabbbc",
            Mesh(dp=7),
            "communicating over Gloo (1 rank on 1 machine and 3 ranks on 2 machines)",
            {"dp": [None]},
        ),
        ("abba", Mesh(dp=4), "communicating over Gloo (ranks of 2 machines are interleaved)", {"dp": [None]}),
        ("aaabbb", Mesh(dp=3, tp=2), None, {"tp": [((0, 1),), None, ((0, 1),)]}),
    ],
)
def test_groups_talk_through_shared_memory_as_far_as_it_reaches(
    hosts: str, mesh: Mesh, text: str | None, layers: dict[str, list[object]]
):
    transports = Transports(hosts=tuple(hosts))
    assert text is None or transports.text(mesh) == text
    for axis, expected in layers.items():
        assert [transports.layers(ranks) for ranks in mesh.groups(axis)] == expected  # type: ignore[arg-type]


def test_an_axis_whose_groups_differ_says_all():
    assert Transports(hosts=tuple("aaabbb")).text(Mesh(dp=3, tp=2)) == (
        "communicating along dp over Gloo (1 rank on 1 machine and 2 ranks on 1 machine), along tp through shared memory or over Gloo"
    )


def _agreed(wanted: list[str], missing: list[str]) -> Transports:
    store = dist.HashStore()
    size = len(wanted)
    first, *others = on_threads(
        [
            lambda rank=rank: agreed_transports(
                SignedStore(store, rank, [""] * size), Mesh(dp=size), wanted[rank], missing[rank]
            )
            for rank in range(size)
        ]
    )
    assert all(other == first for other in others)
    return first


def test_all_ranks_come_to_the_same_choice():
    assert _agreed(["auto"] * 3, [""] * 3) == Transports(hosts=(host_identity(),) * 3)
    one_asks = _agreed(["auto", "gloo", "auto"], ["", "", "no engine."])
    assert one_asks.gloo_because == "asked for" and one_asks.layers([0, 1]) is None
    assert _agreed(["auto"] * 3, ["No engine."] * 3).text(Mesh(dp=3)) == "communicating over Gloo: No engine."
    assert (
        _agreed(["auto"] * 3, ["", "", "No engine."]).text(Mesh(dp=3))
        == "communicating over Gloo: rank 2 (dp=2): No engine."
    )


def test_an_unknown_transport_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    text = "transport=mpi is not known. Use auto or gloo."
    with pytest.raises(DeviceError, match=text):
        open_world(Mesh(), transport="mpi")
    monkeypatch.setenv("MESHLOOM_TRANSPORT", "mpi")
    with pytest.raises(DeviceError, match=text):
        agreed_transports(
            SignedStore(dist.HashStore(), 0, [""] * 2), Mesh(dp=2), launched_transport("auto"), ""
        )
    with pytest.raises(SystemExit) as left:
        main(["train", "job.py", "--transport", "mpi"])
    assert left.value.code == 2 and "invalid choice: 'mpi'" in capsys.readouterr().err


SAYS = """
    import json, os
    from meshloom.launch.opening import open_world
    from meshloom.core.mesh import Mesh
    with open_world(Mesh(dp=2), timeout_seconds=60) as world:
        group = world.local[0].groups["dp"].group
        if world.main:
            print(json.dumps([world.why, type(group).__name__, len(group.secret)]))
"""


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_the_users_choice_reaches_every_rank(
    tmp_path: Path, transport: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A script of the user's own, which passes nothing on: as under torchrun, the environment says it."""
    from meshloom.comm.shm.native_engine import why_not

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("MESHLOOM_TRANSPORT", transport)
    assert run(write_script(tmp_path, SAYS), 2) == 0
    why, group, secret_bytes = json.loads(capfd.readouterr().out)
    # over a network pickled batches are signed, with what the launcher has handed down
    assert secret_bytes == (32 if group == "C10dGroup" else 0)
    if transport == "gloo":
        assert why.endswith(", communicating over Gloo: asked for") and group == "C10dGroup"
    elif why_not():
        assert why.endswith(f", communicating over Gloo: {why_not()}") and group == "C10dGroup"
    else:
        assert why.endswith(", communicating through shared memory") and group == "ShmGroup"
