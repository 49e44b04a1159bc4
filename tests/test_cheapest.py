"""The cheapest combination: compared with all combinations, with an integer program, and within a memory
limit."""

from __future__ import annotations

import itertools
import math
import random
import tracemalloc
from collections.abc import Callable, Sequence

import numpy as np
import pytest

import meshloom.tensor_parallel.search.bucket_elimination
import meshloom.tensor_parallel.search.reshards
from meshloom.tensor_parallel.search.bucket_elimination import Floats, Table, least_sum
from meshloom.tensor_parallel.search.cheapest import Combination, cheapest
from meshloom.tensor_parallel.search.memory_limit import LimitError, cheapest_within
from meshloom.tensor_parallel.search.milp import cheapest_by_milp
from meshloom.tensor_parallel.search.reshards import Reshard, total_cost
from tests.covering import few

Words = tuple[list[Floats], list[Reshard], list[Floats], list[Floats]]


def drawn(seed: int, *, unknowns: int, users: int, barred: float = 0.1) -> Words:
    """A random problem: options, reshards, and bytes of both. A variable may want the value that it
    produces."""
    draw = random.Random(seed)
    numbers: Callable[[], float] = lambda: (  # noqa: E731
        math.inf if draw.random() < barred else draw.choice([0.0, draw.uniform(0, 9)])
    )
    sizes = [draw.randint(1, 4) for _ in range(unknowns)]
    own = [np.array([0.0 if value == 0 else numbers() for value in range(size)]) for size in sizes]
    changes: list[Reshard] = []
    for source in range(unknowns):
        targets = draw.randint(1, 4)
        costs = np.array(
            [
                [numbers() if value else draw.uniform(0, 9) for _ in range(targets)]
                for value in range(sizes[source])
            ]
        )
        wants = {
            user: np.zeros((sizes[user], targets), dtype=bool)
            for user in draw.sample(range(unknowns), draw.randint(1, users))
        }
        for each in wants.values():
            for row in each:
                row[draw.randrange(targets)] = draw.random() < 0.9
        changes.append(
            Reshard(
                source=source,
                costs=costs,
                wants=wants,
                always=np.array([draw.random() < 0.05 for _ in range(targets)]),
            )
        )
    unary_bytes = [np.array([draw.uniform(0, 5) for _ in each]) for each in own]
    return (
        own,
        changes,
        unary_bytes,
        [np.array([[draw.uniform(0, 5) for _ in row] for row in each.costs]) for each in changes],
    )


def naive(
    values: Sequence[int], own: Sequence[Floats], changes: Sequence[Reshard], tables: Sequence[Floats]
) -> float:
    """The cost of a combination, by definition."""
    total = sum(float(each[value]) for each, value in zip(own, values, strict=True))
    for change, table in zip(changes, tables, strict=True):
        for target in range(table.shape[1]):
            if change.always[target] or any(
                wants[values[user], target] for user, wants in change.wants.items()
            ):
                total += float(table[values[change.source], target])
    return total


def all_of(words: Words) -> list[tuple[tuple[int, ...], float, float]]:
    """Every combination: values, cost, bytes."""
    own, changes, unary_bytes, reshard_bytes = words
    rows = itertools.product(*(range(len(each)) for each in own))
    return [
        (
            row,
            naive(row, own, changes, [each.costs for each in changes]),
            naive(row, unary_bytes, changes, reshard_bytes),
        )
        for row in rows
    ]


@pytest.mark.parametrize("seed", range(12))
def test_no_combination_is_cheaper(seed: int):
    words = drawn(seed, unknowns=6, users=3)
    every = all_of(words)
    found = cheapest(*words[:2])
    # sums in another order
    assert found is not None and found.total == pytest.approx(min(cost for _, cost, _ in every), rel=1e-12)
    assert naive(found.values, *words[:2], [each.costs for each in words[1]]) == pytest.approx(
        found.total, rel=1e-12
    )
    for unknown, bounds in enumerate(found.min_marginals):
        for value, bound in enumerate(bounds):
            least = min(cost for row, cost, _ in every if row[unknown] == value)
            assert bound == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("largest", [2**6, 2**11])
def test_what_is_too_large_for_one_table_is_done_by_shares(
    seed: int, largest: int, monkeypatch: pytest.MonkeyPatch
):
    """Small tables stand for the large ones of a reshard with many users; with 2^6 entries, some problems
    are solved by coordinate descent."""
    words = drawn(seed, unknowns=9, users=6, barred=0.0)
    exact = cheapest(*words[:2])
    monkeypatch.setattr(meshloom.tensor_parallel.search.bucket_elimination, "LARGEST", largest)
    monkeypatch.setattr(meshloom.tensor_parallel.search.reshards, "TOGETHER", 2**4)
    found = cheapest(*words[:2])
    assert exact is not None and found is not None
    assert exact.total * (1 - 1e-12) <= found.total <= exact.total * 1.02  # the bound is not always met
    assert found.bound <= exact.total * (1 + 1e-12)
    for bounds, least in zip(found.min_marginals, exact.min_marginals, strict=True):
        assert bool((bounds <= least + 1e-9).all())


def test_what_is_found_by_steps_is_better_than_where_they_began_and_not_said_to_be_the_best(
    monkeypatch: pytest.MonkeyPatch,
):
    """An integer program that had to stop was taken for optimal, and the account said of what it had not
    sharded that this would cost more than it saves."""
    words = drawn(7, unknowns=40, users=4, barred=0.0)
    exact = cheapest(*words[:2])
    monkeypatch.setattr(meshloom.tensor_parallel.search.bucket_elimination, "LARGEST", 2**7)
    monkeypatch.setattr(meshloom.tensor_parallel.search.reshards, "TOGETHER", 2**7)
    found = cheapest(*words[:2])
    assert exact is not None and exact.is_proved and found is not None and not found.is_proved
    assert exact.total <= found.total <= 1.02 * exact.total < 0.9 * total_cost([0] * 40, *words[:2])


@pytest.mark.parametrize("seed", few(range(8), 2))
def test_an_integer_program_finds_the_same(seed: int):
    words = drawn(seed, unknowns=12, users=4)
    found, other = cheapest(*words[:2]), cheapest_by_milp(*words[:2])
    assert found is not None and other is not None
    assert found.total <= other[1] * (1 + 1e-9) and other[1] <= found.total * 1.002  # the solver's gap
    # the solver's tolerance
    assert naive(other[0], *words[:2], [each.costs for each in words[1]]) == pytest.approx(other[1], rel=1e-6)


@pytest.mark.parametrize("seed", few(range(12), 4))
def test_a_limit_is_kept_at_the_least_cost(seed: int):
    words = drawn(seed, unknowns=6, users=3)
    every = [each for each in all_of(words) if math.isfinite(each[1])]
    smallest, largest = (extreme(size for _, _, size in every) for extreme in (min, max))
    for share in (0.05, 0.2, 0.5):
        limit = smallest + share * (largest - smallest)
        found = cheapest_within(*words, limit)
        assert isinstance(found, Combination)
        _, cost, size = next(each for each in every if each[0] == found.values)
        assert size <= limit * (1 + 1e-9) and cost == pytest.approx(found.total, rel=1e-9)
        best = min(cost for _, cost, size in every if size <= limit)
        # neither solver looks for gains below a thousandth
        assert found.total <= best * 1.002 + 1e-9
        assert found.bound <= best * (1 + 1e-9)
    with pytest.raises(LimitError) as caught:
        cheapest_within(*words, smallest * 0.99)
    assert caught.value.least == pytest.approx(smallest, rel=1e-9)


def test_what_cannot_be_is_none():
    own = [np.array([1.0, math.inf]), np.array([0.0])]
    change = Reshard(
        source=0, costs=np.array([[math.inf], [0.0]]), wants={1: np.array([[True]])}, always=np.array([False])
    )
    assert cheapest(own, [change]) is None


def test_a_chain_of_any_length_takes_a_table_per_link():
    draw = random.Random(0)
    tables = [
        Table(scope=(at, at + 1), entries=np.array([[draw.random() for _ in range(5)] for _ in range(5)]))
        for at in range(300)
    ]
    least = np.zeros(5)  # the least cost of all links so far, by the last one's value
    for table in tables:
        least = (least[:, None] + table.entries).min(axis=0)
    told: list[tuple[int, int]] = []
    found = least_sum([5] * 301, tables, lambda *count: told.append(count))
    assert told == [(done, 301) for done in range(1, 302)]
    assert found is not None and found.total == pytest.approx(float(least.min()), rel=1e-12)


def _peak_entries(sizes: Sequence[int], tables: Sequence[Table]) -> tuple[float, bool]:
    """The most numbers in memory during a search, and those that remain; and whether it succeeded."""
    tracemalloc.start()
    try:
        found = least_sum(sizes, tables)
        return tracemalloc.get_traced_memory()[1] / 8, found is not None
    finally:
        tracemalloc.stop()


def test_what_is_too_large_for_tables_is_known_before_there_are_any():
    """Twelve blocks with experts took tables of 128 MiB each, up to the first that was too large: 7 GB,
    and most of the time of the search."""
    small = [
        Table(scope=(3 * number, 3 * number + 1, 3 * number + 2), entries=np.zeros((50, 50, 50)))
        for number in range(4)
    ]
    large = [
        Table(scope=pair, entries=np.zeros((200, 200))) for pair in itertools.combinations(range(12, 17), 2)
    ]
    peak, found = _peak_entries([50] * 12 + [200] * 5, [*small, *large])
    assert not found
    assert peak < 50**3 / 4  # no table was joined


def test_joined_tables_are_let_go():
    """The joined tables of all variables were most of a choice's memory: what is kept of each is smaller
    by its number of values."""
    tables = [
        Table(scope=(3 * number, 3 * number + 1, 3 * number + 2), entries=np.ones((50, 50, 50)))
        for number in range(20)
    ]
    peak, found = _peak_entries([50] * 60, tables)
    assert found
    assert peak < 3 * 50**3
