"""Each bug of the fourth list (tests/planted/fourth/) is caught by `meshloom verify` at its defaults; what is not, or is not named or placed,
is listed with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planted.edits import Edit, copied
from tests.planted.fourth import FOURTH

NOT_CAUGHT: dict[str, str] = {}
NOT_NAMED: dict[str, str] = {
    "sparse_counts_of_first": "a row that no sample uses is said, not that others are dropped, which shows in other steps",
    "padding_not_shifted": "the rank, the operator and the part of its weight are said, not that it is the padding's row",
    "pool_not_sorted": "unknown: gradients of other parameters are not tried",
}
NOT_PLACED: dict[str, str] = {
    "last_bucket_undivided": "all of the bucket are equally wrong; said is the one whose gradient comes first",
    "sparse_last_chunk_only": "both tables are equally wrong; said is the one whose gradient comes first",
    "sparse_counts_of_first": "in the first step that differs only the other table is wrong",
    "deferred_weights_kept": "all linear layers are wrong; said is the one whose gradient comes first",
    "recompute_draws_anew": "outputs agree; said is the layer whose gradient comes first, as of any that agree: its input is computed again from another mask",
    "text_values_any": "said is out, the first that both run: no rank runs swap",
    "rows_stick": "the other table differs first after resuming",
    "pool_not_sorted": "said is the one whose gradient comes first",
    "carried_into_evaluation": "said is rnn.gru, the layer within rnn",
    "closure_draws": "all updates are other ones; said is the first of them",
    "same_masks_each_step": "no module is said: both sides draw alike",
}


def test_each_miss_is_one_of_them():
    assert len(FOURTH.edits) >= 90
    FOURTH.lists_each_miss(caught=NOT_CAUGHT, named=NOT_NAMED, placed=NOT_PLACED)


@pytest.mark.parametrize("bug", FOURTH.edits, ids=lambda bug: bug.name)
def test_what_a_bug_changes_is_in_the_code_once(bug: Edit):
    bug.is_in_the_code_once()


@pytest.mark.parametrize("bug", FOURTH.cases())
def test_a_planted_bug_is_caught_and_named(bug: Edit, tmp_path: Path):
    found = FOURTH.found(bug, tmp_path)
    assert found.code == (0 if bug.name in NOT_CAUGHT else 1), found.text
    if bug.name not in NOT_CAUGHT:
        assert bug.name in NOT_NAMED or bug.says in found.text, found.text
        assert bug.module in (None, found.module) or bug.name in NOT_PLACED, found.text


@pytest.mark.parametrize(("job", "plan", "devices"), FOURTH.runs())
def test_without_a_bug_the_same_runs_are_equal(job: str, plan: str, devices: str, tmp_path: Path):
    FOURTH.is_equal(tmp_path, job, plan, devices)


@pytest.mark.slow
def test_the_copy_is_what_runs(tmp_path: Path):
    with (copied(tmp_path) / "cli" / "verb_verify.py").open("a") as file:
        file.write('\nraise SystemExit("This is the copy.")\n')
    found = FOURTH.verified(tmp_path, "blocks:job", "dp=2", "simulated")
    assert found.code == 1 and found.text == "This is the copy."
