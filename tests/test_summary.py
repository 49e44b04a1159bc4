"""Seconds and bytes of a run are divided without losing or inventing any."""

from __future__ import annotations

import pytest

from meshloom.telemetry.summary import time_shares


def test_shares_add_up_to_one() -> None:
    shares = time_shares(10.0, 1.0, 4.0, [[0.5, 3.0], [1.0, 3.5], [0.0, 0.0]], 2, 2)
    assert shares.compute + shares.communication + shares.waiting + shares.data == pytest.approx(1.0)
    assert shares.waiting == pytest.approx(0.4)  # 4.5 s late, of which 4 s were spent in collectives


def test_the_slowest_rank_never_waits() -> None:
    assert time_shares(10.0, 0.0, 2.0, [[1.0, 1.0], [2.0, 2.0]], 1, 2).waiting == 0.0


def test_newest_steps_stand_for_all() -> None:
    assert time_shares(100.0, 0.0, 50.0, [[0.0], [1.0]], 0, 10).waiting == pytest.approx(0.1)
