"""Bytes as values: they add up by axis and kind, and what is expected of components adds up to what a run
sends."""

from __future__ import annotations

from meshloom.comm.recording import Count
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


def test_traffic_leaves_out_what_carried_nothing() -> None:
    counts = {
        "dp": {
            "all_reduce": Count(calls=2, bytes=64, seconds=0.1),
            "barrier": Count(calls=1, bytes=0, seconds=0.1),
        }
    }
    assert Traffic.of(counts).bytes == {"dp": {"all_reduce": 64}}
    assert Traffic.of(counts).total("dp") == 64


def test_traffic_adds_up_by_axis_and_kind() -> None:
    one, two = (
        Traffic({"dp": {"all_reduce": 1, "broadcast": 2}}),
        Traffic({"dp": {"all_reduce": 4}, "tp": {"send": 8}}),
    )
    both = {"dp": {"all_reduce": 5, "broadcast": 2}, "tp": {"send": 8}}
    assert (one + two).bytes == both and (two + one).bytes == both
    assert one.bytes == {"dp": {"all_reduce": 1, "broadcast": 2}}  # values: neither has changed
    assert (two * 3).bytes == {"dp": {"all_reduce": 12}, "tp": {"send": 24}}
    assert (one + two).over(["tp", "pp"]).bytes == {"tp": {"send": 8}, "pp": {}}


def test_components_add_up_occasion_by_occasion() -> None:
    size = lambda num_bytes: Traffic.along("dp", all_reduce=num_bytes)  # noqa: E731
    parts = [
        ExpectedBytes(once=size(1), per_step=size(10)),
        ExpectedBytes(per_step=size(20), per_check=size(100)),
        ExpectedBytes(per_evaluation=size(1000), so_far=size(10_000)),
    ]
    total = sum(parts, ExpectedBytes())
    assert total.after() == size(10_001)
    assert total.after(steps=2, checks=3, evaluations=4) == size(1 + 60 + 300 + 4000 + 10_000)
