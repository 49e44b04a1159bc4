"""Each bug of the eighth list (tests/planted/eighth/) is caught by `meshloom verify` at its defaults, and its first cause names it; what is
named in general alone, escapes, or has another first module, is listed with the reason.

The list was written blind: 50 bugs, by a reader of the code and of the documents who had not seen the checks, of which one changes nothing on a
machine with fast links and is left out. On code that no mend had been made of for it 46 of the 49 were caught (the report of one of them ended
with an error), 26 named and 17 more in general; of the 36 that have a first module 30 were placed. Now all are caught, 29 named and 35 placed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planted.edits import Edit
from tests.planted.eighth.whole_list import EIGHTH

ESCAPES: dict[str, str] = {}
IN_GENERAL: dict[str, str] = {
    "pull_always_from_first_server": "gradients are said to be lost, not that what a server has updated is overwritten",
    "refilled_cast_from_start_of_unit": "the module whose output differs is said, not what its weights were cast from",
    "trial_of_one_step": "said is that an update differs that did not before, not that the optimizer looks at whole parameters",
    "closure_fetches_old_shards": "further evaluations of the loss are one of three causes that are said",
    "by_metric_without_function": "what the scheduler keeps is said to be another number, not that it was given the metric itself",
    "evaluation_data_told_epoch": "other data is said, not why it is other",
    "python_random_unseeded_in_samples": "other data is said, not why it is other",
    "dropped_samples_begin_next_epoch": "other data at the end of the epoch is said, not what follows the batch that is dropped",
    "instance_norm_cumulative": "merging of what chunks write is said, not that this layer never moves its statistics",
    "joined_chunks_count_each_replica": "said is that a buffer depends on samples, where it depends on how often it is written",
    "changing_factors_never_looked_for": "merging of what chunks write is said, not by which rates",
    "reshaped_buffer_of_first_replica": "merging of what chunks write is said, not whose",
    "teacher_rate_of_first_step": "a change without a gradient is said, not that its rate is the first step's",
    "written_values_dropped": "updates that differ are said, not that they begin from other values",
    "recurrent_masks_by_time": "the module that draws is said, not that its draws are other rows'",
    "row_draws_from_first_row": "the module that draws is said, not that its draws are other rows'",
    "thrown_away_normals_too_few": "other values before the first step are said, of which draws are one cause",
    "counters_lose_their_counts": "the end of the epoch is said first, and then what a scheduler has made of the learning rate",
    "float16_loss_not_widened": "gradients that are not finite are said, not what overflows",
    "statistics_lowered": "another precision is one of the causes that are said",
}
NOT_PLACED: dict[str, str] = {
    "thrown_away_normals_too_few": "the parameters that begin otherwise are named; said is where the first gradient of backward differs",
}


def test_each_miss_is_one_of_them():
    assert len(EIGHTH.edits) == 49
    EIGHTH.lists_each_miss(caught=ESCAPES, named=IN_GENERAL, placed=NOT_PLACED)


@pytest.mark.parametrize("bug", EIGHTH.edits, ids=lambda bug: bug.name)
def test_what_a_bug_changes_is_in_the_code_once(bug: Edit):
    bug.is_in_the_code_once()


@pytest.mark.parametrize("bug", EIGHTH.cases())
def test_a_planted_bug_is_caught_and_named(bug: Edit, tmp_path: Path):
    found = EIGHTH.found(bug, tmp_path)
    if bug.name in ESCAPES:
        assert found.code == 0 and "DIFFERS" not in found.text, found.text
        return
    assert found.code == 1 and "DIFFERS" in found.text, found.text
    assert bug.says in found.first_cause, found.text
    assert bug.module in (None, found.module) or bug.name in NOT_PLACED, found.text


@pytest.mark.parametrize(("job", "plan", "devices"), EIGHTH.runs())
def test_without_a_bug_the_same_runs_are_equal(job: str, plan: str, devices: str, tmp_path: Path):
    EIGHTH.is_equal(tmp_path, job, plan, devices)
