"""Bugs of the list that verification catches and does not name, or places in another module, with the reason of each."""

from __future__ import annotations

NOT_NAMED: dict[str, str] = {
    # What each replica added in the step before is not kept, and cannot be computed again once parameters have moved.
    "exchanging-one_replica_sends_what_it_had_a_step_before": "parts of the step before are not known",
    # Shifts are looked for in sums of all replicas, and in samples of elements, which a replica's rows are not.
    "exchanging-rows_of_the_second_replica_are_off_by_one": "shifts of one replica's rows are not tried",
    # It is missing where verification gathers parameters, too; what is seen is a forward, whose module is named.
    "slicing-the_last_element_that_a_rank_keeps_is_never_updated": "hidden from what is compared",
}
NOT_PLACED = {
    # Under tp=2 ranks hold `second`'s output in parts that are added up later, and say nothing of it: `head` is the first that is known.
    "evaluating-one_bias_is_left_out_of_evaluations-1": "outputs that are partial sums are not known",
}
