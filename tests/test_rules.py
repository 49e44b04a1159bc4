"""Every rule is correct: the shards of a call, under every strategy that the rule allows, equal the call
on one device, forward and backward."""

from __future__ import annotations

import pytest
import torch

from meshloom.tensor_parallel.rules.table import BUILT_IN
from tests.rule_calls import CALLS, POINTWISE, Chance, call
from tests.rule_check import Checked, check_call

MOST_RANKS = 4
SUMS_ONLY = {"masked_scatter"}  # has no dim that can be sharded; it is linear in partial sums

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings(
        "ignore:The use of `x.T`:UserWarning",
        "ignore:An output with one or more elements was resized:UserWarning",
    ),
]


def check(name: str, seeds: range) -> Checked:
    """Checks calls of an operator, each over 2, 3 or 4 ranks."""
    checked = Checked()
    for seed in seeds:
        for make in {**CALLS, **POINTWISE}[name]:
            chance = Chance(1000 * seed + len(name))
            check_call(make(chance), BUILT_IN, 2 + seed % (MOST_RANKS - 1), chance, checked)
    return checked


def test_every_rule_has_calls_and_is_of_an_operator_of_torch():
    assert CALLS.keys() == BUILT_IN.keys()
    assert all(hasattr(torch.ops.aten, name) for name in BUILT_IN if "::" not in name)


@pytest.mark.parametrize("name", [*CALLS, *POINTWISE])
@pytest.mark.every
def test_parts_are_what_one_device_computes(name: str):
    check(name, range(2))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CALLS, *POINTWISE])
@pytest.mark.every
def test_parts_are_what_one_device_computes_whatever_the_shapes(name: str):
    checked = check(name, range(3, 15))
    assert checked.partial if name in SUMS_ONLY else checked.with_cuts, f"no call of {name} was divided"


def test_heads_of_grouped_queries_are_cut_where_all_share_one_mask():
    """Falcon's attention stayed unsharded: a mask [samples, 1, queries, keys] was taken to have a head for
    each of the queries' 5."""
    q, k, mask = torch.randn(1, 5, 7, 4), torch.randn(1, 1, 7, 4), torch.ones(1, 1, 7, 7).bool().tril()
    checked = Checked()
    check_call(
        call("scaled_dot_product_attention", q, k, k.clone(), mask, enable_gqa=True),
        BUILT_IN,
        3,
        Chance(0),
        checked,
    )
    assert checked.labels["r"]
