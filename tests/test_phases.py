"""Operations in phases run in the order of their start, overlap, and fail together."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from meshloom.comm.group import Work
from meshloom.comm.network.phases import PhasedLine, Phases

WAIT_SECONDS = 20.0  # a test that takes longer hangs


class _Event(Work):
    def __init__(self) -> None:
        self.event = threading.Event()

    def wait(self) -> None:
        assert self.event.wait(WAIT_SECONDS)

    def is_finished(self) -> bool:
        return self.event.is_set()


def test_first_phases_go_on_while_an_earlier_second_phase_is_under_way():
    line, seen = PhasedLine("test"), list[str]()
    networks, last_begun = [_Event(), _Event(), _Event()], threading.Event()

    def second(number: int) -> Sequence[Work]:
        seen.append(f"{number} second")
        if number == 2:
            last_begun.set()
        return [networks[number]]

    operations = [
        line.start(
            Phases(
                first=lambda number=number: seen.append(f"{number} first"),
                second=lambda number=number: second(number),
                third=lambda number=number: seen.append(f"{number} third"),
            )
        )
        for number in range(3)
    ]
    assert last_begun.wait(WAIT_SECONDS)
    assert seen == ["0 first", "0 second", "1 first", "1 second", "2 first", "2 second"] and not any(
        each.done() for each in operations
    )
    for network in reversed(networks):  # whatever comes first, the third phases keep the order
        network.event.set()
    for operation in operations:
        operation.result(WAIT_SECONDS)
    assert seen[6:] == ["0 third", "1 third", "2 third"]
    assert line.close(WAIT_SECONDS)


@pytest.mark.parametrize("phase", ["first", "second", "third"])
def test_after_a_failure_all_later_operations_fail_with_it(phase: str):
    line = PhasedLine("test")

    def fail() -> None:
        raise ValueError(phase)

    well = {"first": lambda: None, "second": list, "third": lambda: None}
    done, failed = line.start(Phases(**well)), line.start(Phases(**{**well, phase: fail}))  # type: ignore[arg-type]
    done.result(WAIT_SECONDS)
    assert str(failed.exception(WAIT_SECONDS)) == phase
    later = line.start(Phases(**well))  # type: ignore[arg-type]
    assert str(later.exception(WAIT_SECONDS)) == phase
    assert line.close(WAIT_SECONDS)


def test_what_does_not_end_is_told_and_ends_when_it_can():
    line, network = PhasedLine("test"), _Event()
    operation = line.start(Phases(first=lambda: None, second=lambda: [network], third=lambda: None))
    assert not line.close(0.01)
    network.event.set()
    operation.result(WAIT_SECONDS)
    assert line.close(WAIT_SECONDS)
