"""Which rank is said to hang: one that computes far too long or was stopped while the others wait, and no
healthy one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from meshloom.comm.liveness.activity import ActivitySnapshot
from meshloom.core.mesh import Mesh
from meshloom.launch.processes.hang import LOOK_SECONDS, HangWatch, ProcessState

MESH = Mesh(dp=2, pp=2)  # ranks 0 and 2 are a replica, and so are 1 and 3
STUCK = ActivitySnapshot(
    phase="computing",
    step=12,
    stage=1,
    kind="F",
    microbatch=3,
    since=100.0,
    moved=100.0,
    waits=False,
    longest_seconds=0.02,
)
WAITING = replace(STUCK, phase="before", stage=0, kind="B", waits=True)
RUNNING, ASLEEP, STOPPED = (ProcessState(state=state) for state in "RST")


@dataclass
class Looks:
    """What a watch says when it looks at the same for some seconds."""

    watch: HangWatch = field(default_factory=lambda: HangWatch(MESH, 7.0))
    now: float = 100.0

    def during(
        self,
        seconds: float,
        doing: list[ActivitySnapshot | None],
        processes: list[ProcessState] | None = None,
        *,
        starved: float = 0.0,
        worked: float = 0.0,
        step: float = LOOK_SECONDS,
    ) -> str | None:
        """starved, worked: shares of the time in which the ranks wait for a core, and have one."""
        end = self.now + seconds
        while self.now < end:
            self.now += step
            states = processes or [ASLEEP, ASLEEP, RUNNING, ASLEEP]
            said = self.watch.look(
                self.now,
                doing,
                [
                    replace(each, starved_seconds=starved * self.now, worked_seconds=worked * self.now)
                    for each in states
                ],
            )
            if said:
                first, *others = said.ranks
                assert said.is_stopped == (states[first].state == "T")
                assert others or f"ank {first} " in said.text
                return said.text
        return None


def test_a_rank_that_computes_far_too_long_is_named_while_its_replica_waits():
    looks = Looks()
    said = looks.during(10, [WAITING, WAITING, STUCK, WAITING])
    assert said is not None and looks.now - 100.0 < 8.0
    assert said.startswith(
        "Rank 2 (dp=0,pp=1) has been computing 1F3 of step 12 (stage 1, forward of microbatch 3) for 7 s "
        "(it is running, as in a loop without an end); it took 0.02 s at most before"
    )
    assert "--hang-seconds" in said


def test_ranks_of_a_script_that_all_wait_have_called_different_things():
    waiting = [replace(WAITING, phase="own code") for _ in range(4)]
    looks = Looks(HangWatch(MESH, 7.0, scripts=True))
    assert looks.during(4.5, waiting) is None
    said = looks.during(1, waiting)
    assert said is not None and said.startswith("All ranks have waited for one another for 5 s")
    assert Looks().during(60, waiting) is None  # a job's ranks call what we call
    some = [*waiting[:3], replace(waiting[0], waits=False)]
    assert Looks(HangWatch(MESH, 7.0, scripts=True)).during(60, some) is None
    assert Looks(HangWatch(MESH, 7.0, scripts=True)).during(60, waiting, worked=0.9) is None
    starved = Looks(HangWatch(MESH, 7.0, scripts=True))
    assert starved.during(9, waiting, starved=0.5) is None and starved.during(2, waiting, starved=0.5)


def test_the_other_replica_may_still_compute():
    assert Looks().during(10, [WAITING, STUCK, STUCK, replace(STUCK, moved=120.0)])


def test_ten_times_what_it_usually_takes_is_given():
    slow = replace(STUCK, longest_seconds=2.0)
    assert Looks().during(19, [WAITING, WAITING, slow, WAITING]) is None
    assert Looks().during(21, [WAITING, WAITING, slow, WAITING])


def test_healthy_runs_are_not_said_to_hang():
    for other in (
        replace(STUCK, longest_seconds=0.0),
        replace(STUCK, phase="saving"),
        replace(STUCK, phase="reading"),
        replace(STUCK, waits=True),
    ):
        assert Looks().during(60, [WAITING, WAITING, other, WAITING]) is None
    # the other one computes, too
    assert Looks().during(60, [replace(WAITING, waits=False), WAITING, STUCK, WAITING]) is None
    assert Looks().during(60, [None, WAITING, STUCK, WAITING]) is None
    assert Looks().during(6.5, [WAITING, WAITING, STUCK, WAITING]) is None


def test_a_rank_that_moves_begins_anew():
    looks = Looks()
    for _ in range(10):
        assert looks.during(5, [WAITING, WAITING, replace(STUCK, moved=looks.now), WAITING]) is None


def test_a_rank_that_gets_no_core_is_not_said_to_hang():
    assert Looks().during(30, [WAITING, WAITING, STUCK, WAITING], starved=0.9) is None
    assert Looks().during(20, [WAITING, WAITING, STUCK, WAITING], starved=0.3)


def test_a_rank_that_waits_for_the_disk_or_is_debugged_is_not_said_to_hang():
    for state in "Dt":
        assert (
            Looks().during(
                60, [WAITING, WAITING, STUCK, WAITING], [ASLEEP, ASLEEP, ProcessState(state=state), ASLEEP]
            )
            is None
        )


def test_time_in_which_the_launcher_had_no_turn_does_not_count():
    assert Looks().during(300, [WAITING, WAITING, STUCK, WAITING], step=60.0) is None  # five looks


def test_a_stopped_rank_is_named_whatever_it_was_doing():
    saving = replace(STUCK, phase="saving", waits=True)
    said = Looks().during(9, [WAITING, saving, WAITING, WAITING], [ASLEEP, STOPPED, ASLEEP, ASLEEP])
    assert said is not None
    assert said.startswith(
        "Rank 1 (dp=1) has been stopped (SIGSTOP) for 7 s while saving after 12 steps, waiting for another rank"
    )
    assert Looks().during(60, [WAITING] * 4, [STOPPED] * 4) is None  # whoever stops all of them means it
