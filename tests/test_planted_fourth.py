"""Each bug of the fourth list (tests/planted/fourth/) is caught by `meshloom verify` at its defaults; what is not, or is not named or placed,
is listed with the reason."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.planted.fourth import EDITS
from tests.planted.fourth.editing import PACKAGE, TIMEOUT_SECONDS, Edit, copied, verified

long = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(TIMEOUT_SECONDS + 60)]

NOT_CAUGHT: dict[str, str] = {}
NOT_NAMED: dict[str, str] = {
    "sparse_counts_of_first": "that a gradient has other rows is said; whether some are lost or too many, and where, is not",
    "later_stage_draws_again": "the first output of a stage that differs is said: draws are one of three reasons, in the second cause",
    "average_not_lent": "the output of the head is said, not that the tied weight is another one there",
    "padding_not_shifted": "the part of the weight is said, not that it is the padding's row; that the programs are right is wrong",
    "class_weight_in_backward": "the first wrong gradient is said to be that of flatten, which the loss's backward returns",
    "shared_heads_not_summed": "a forward that differs by rounding is taken for the cause, and the programs for right",
    "shortcut_gradient_lost": "the programs are said to be right: the backward of layers that share an input does not run in lockstep",
    "text_values_any": "which parts are used and which are not is said, not that a program is used for another text",
    "python_draws_of_first": "draws are one of three reasons",
    "pool_not_sorted": "unknown: gradients of other parameters are not tried",
    "ema_on_skip": "averages are said, with moving without an update as one of three reasons",
    "mix_unseeded": "data is said, with draws of mix as one of many reasons",
    "rows_uneven": "the module is said, and draws as one of several reasons",
    "step_in_metrics": "the metric's number is said, not that it is given another step",
    "carried_into_evaluation": "the layer is said, not that it goes on from another batch's state",
    "closure_draws": "an optimizer's state or schedule is said to be wrong",
    "stale_bucket": "the factor is said, with a bucket that is reduced twice as the reason",
    "hooks_lost": "the factor of the hook is said, not that a hook is lost",
}
NOT_PLACED: dict[str, str] = {
    "last_bucket_undivided": "all of the bucket are equally wrong; said is the one whose gradient comes first",
    "sparse_last_chunk_only": "both tables are equally wrong; said is the one whose gradient comes first",
    "sparse_counts_of_first": "in the first step that differs only the other table is wrong",
    "deferred_weights_kept": "all linear layers are wrong; said is the one whose gradient comes first",
    "later_stage_draws_again": "said is attn.o, the layer behind the attention",
    "shared_heads_not_summed": "said is a norm whose output differs by rounding",
    "recompute_draws_anew": "said is the layer whose input is computed again from another mask",
    "text_values_any": "said is copy, which runs where swap should",
    "python_draws_of_first": "said is the one whose gradient comes first",
    "batch_of_first_microbatch": "said is the one whose gradient comes first",
    "rows_stick": "the other table differs first after resuming",
    "pool_not_sorted": "said is the one whose gradient comes first",
    "carried_into_evaluation": "said is rnn.gru, the layer within rnn",
    "closure_draws": "all updates are other ones; said is the first of them",
    "same_masks_each_step": "no module is said: both sides draw alike",
    "rows_joined_backwards": "the attribute rnn.hidden is said in a line of its own, which has no first module",
}


def marks(devices: str) -> list[pytest.MarkDecorator]:
    return [*long, pytest.mark.processes] if devices == "cpu" else long


def test_each_miss_is_one_of_them():
    names = Counter(each.name for each in EDITS)
    assert len(names) == len(EDITS) >= 90, [name for name, count in names.items() if count > 1]
    assert {*NOT_CAUGHT, *NOT_NAMED, *NOT_PLACED} <= set(names)
    for each in EDITS:
        assert each.says or each.name in {*NOT_CAUGHT, *NOT_NAMED}, each.name
        assert each.module or each.name not in NOT_PLACED, each.name


@pytest.mark.parametrize("bug", EDITS, ids=lambda bug: bug.name)
def test_what_a_bug_changes_is_in_the_code_once(bug: Edit):
    text = (PACKAGE / bug.file).read_text(encoding="utf-8")
    assert text.count(bug.old) == 1, bug.misplaced(text)
    assert bug.old != bug.new


CASES = [pytest.param(each, id=each.name, marks=marks(each.devices)) for each in EDITS]


@pytest.mark.parametrize("bug", CASES)
def test_a_planted_bug_is_caught_and_named(bug: Edit, tmp_path: Path):
    bug.planted(copied(tmp_path))
    found = verified(tmp_path, *bug.run)
    assert found.code == (0 if bug.name in NOT_CAUGHT else 1), found.text
    if bug.name not in NOT_CAUGHT:
        assert bug.name in NOT_NAMED or bug.says in found.text, found.text
        assert bug.module in (None, found.module) or bug.name in NOT_PLACED, found.text


RUNS = [
    pytest.param(*run, id="-".join(run), marks=marks(run[2])) for run in sorted({each.run for each in EDITS})
]


@pytest.mark.parametrize(("job", "plan", "devices"), RUNS)
def test_without_a_bug_the_same_runs_are_equal(job: str, plan: str, devices: str, tmp_path: Path):
    copied(tmp_path)
    found = verified(tmp_path, job, plan, devices)
    assert found.code == 0 and "EQUAL" in found.text and "DIFFERS" not in found.text, found.text


@pytest.mark.slow
def test_the_copy_is_what_runs(tmp_path: Path):
    with (copied(tmp_path) / "cli" / "verb_verify.py").open("a") as file:
        file.write('\nraise SystemExit("This is the copy.")\n')
    found = verified(tmp_path, "blocks:job", "dp=2", "simulated")
    assert found.code == 1 and found.text == "This is the copy."
