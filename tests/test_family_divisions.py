"""Every family that is captured is divided over two ranks or three, at least half of its parameters and of its FLOPs, and
equals one device.

Dropout on, in float64, at rates for which tiny models are worth dividing. A fixed handful is `slow`; all others
run in campaigns.
"""

from __future__ import annotations

import pytest

from meshloom.program.cost.cost import costs
from meshloom.tensor_parallel.explain import account_of
from tests.covering import in_turn
from tests.division import compare, subject_of
from tests.families import FAMILIES
from tests.families.limits import NOT_READ

COVERING = {"llama", "bert", "t5", "resnet", "mixtral", "lstm"}
IN_TURN = in_turn([name for name in FAMILIES if name not in NOT_READ], (2, 3))

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [pytest.param(*each, marks=() if each[0] in COVERING else pytest.mark.campaign) for each in IN_TURN],
)
def test_half_of_a_family_is_divided_and_equals_one_device(name: str, num_ranks: int):
    subject = subject_of(FAMILIES[name].make_job(True))
    compared = compare(subject, num_ranks)
    assert compared.error <= 1e-11, compared.what  # of sums in other orders, in norms of few samples
    account = account_of(compared.partition, costs(subject.program))
    assert min(account.parameters_divided, account.flops_divided) >= 0.5, account.whole
