"""Writes docs/rules.md: the factor map of every operator that has a rule. Run as `python -m
tests.rule_table`."""

from __future__ import annotations

from pathlib import Path

from meshloom.tensor_parallel.layout.layout import layout_of
from meshloom.tensor_parallel.rules.factors import Factors, labels_in, shown
from meshloom.tensor_parallel.rules.table import BUILT_IN
from tests.rule_calls import CALLS, Chance
from tests.rule_check import program_of

FILE = Path(__file__).parents[1] / "docs" / "rules.md"
HEADER = """# Rules: how operators may be sharded

A rule says which dims of an operator's operands and results are the same axis, as in einsum. It determines how a call may be sharded,
which collectives run, and the gradients. `tests/test_rules.py` runs every rule on random calls, with every sharding that it allows, over
2 to 4 ranks, forward and backward, against the call on one device.

    linear       b* k, o k, o -> b* o; sum k; add 2
    view         b (h d) -> b h d
    split        b (q+k+v) -> b q, b k, b v

- A label is an axis: a rank that holds some of its indices in one tensor holds the same indices in the others. Any axis may be sharded except
  those marked `!`, and `_`, a dim that is unsharded and shared with no other tensor.
- `(h d)` is a dim composed of two axes, outermost first; `(q+k)` is a concatenation. `b*` is any number of leading dims.
- A label after `sum` is summed over: if it is sharded, every rank has a partial result of full shape, and the partial results are summed.
  Operands after `add` (numbered from 0) are added to that sum, and must be partial themselves.
- `linear 0+2 1+2` says that the result is partial if operands 0 and 2, or operands 1 and 2, are partial and all others replicated.
- *communicates* names an axis over which the operator itself communicates if it is sharded: every rank then has the full result,
  or (sharded) its shard of it.
- *t goes with e*: which rows belong to which expert is known at run time only. If the experts e of a parameter are sharded, every rank
  computes the rows t that are routed to its experts, however many they are. Neither is sharded alone.
- `{b h}` is an operand that every rank needs in full even if an axis of its other dims is sharded: the state of a recurrent cell, of which
  every rank computes some hidden units.

If the rows and the columns of one matrix turn out to be the same axis (x + W x, or a state that W updates), the columns become an axis of
their own, and the matrix is sharded by rows: every rank then needs the full x.

An operator without a rule is computed by every rank, on full operands.

## Adding a rule

1. If torch tags the operator as pointwise and deterministic, like GELU, it needs none: `is_elementwise` in `tensor_parallel/rules/elementwise.py`
   decides this, and `elementwise` beside it is the rule.
2. Otherwise write a function from `Call` (`tensor_parallel/rules/operator_call.py`) to `Factors` (`tensor_parallel/rules/factors.py`) in the file of the
   operator's family in `tensor_parallel/rules/`. If one line says it all, `text("n k, k m -> n m; sum k")` (`products.py`) is that function.
3. Add it, by the operator's name, to the table at the end of that file. `tensor_parallel/rules/table.py` joins the tables: a new
   family is a new file whose table is added there.
4. Add random calls of the operator to `CALLS` in `tests/rule_calls.py`, and run `python -m tests.rule_table`, which writes this page.
5. Run `pytest tests/test_rules.py`, which checks every sharding that the rule allows.

## Rules for custom operators

`Job(rules={"mylib::swiglu": "b* f, b* f -> b* f"})` gives an operator of `torch.library` a rule, by its name and in this form: all
tensor arguments in the order of its schema, then its results. The call gets a rank's shards and otherwise unchanged arguments, so a size among
its arguments must be that of an unsharded dim. A rule that is wrong gives wrong results; `meshloom verify` finds it.
`examples/07_own_operator.py` does this.

## Operators

The map of one call of each; the dims of other calls follow from their shapes and arguments. Elementwise operators that torch tags as pointwise and
deterministic (`add`, `gelu`, `where`) have the map `d0 d1 d2 -> d0 d1 d2` without an entry.

| operators | map | summed | communicates |
|---|---|---|---|
"""


def main() -> None:
    """Write the file."""
    FILE.write_text(table())


def table() -> str:
    """The file's text."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name in CALLS:
        factors = _example(name)
        text, *_clauses = shown(factors).split("; ")
        summed = " ".join(sorted(factors.sums))
        communicates = " ".join(
            [
                *sorted(factors.reduced_inside),
                *(f"{label} (sharded)" for label in sorted(factors.collectives)),
            ]
        )
        communicates += f"{factors.routed.rows} goes with {factors.routed.groups}" if factors.routed else ""
        rows.setdefault((text, summed, communicates), []).append(name)
    lines = [
        f"| {', '.join(f'`{name}`' for name in names)} | `{text}` | {summed} | {communicates} |"
        for (text, summed, communicates), names in rows.items()
    ]
    return HEADER + "\n".join(lines) + "\n"


def _example(name: str) -> Factors:
    """The map of the call, among a few, in which most axes may be sharded."""
    found: list[Factors] = []
    for seed in range(8):
        program, _ = program_of(CALLS[name][0](Chance(seed)))
        mapped = layout_of(program, BUILT_IN).mapped.get(program.nodes[0].name)
        if mapped is not None:
            found.append(mapped.factors)
    return max(found, key=lambda each: len(_labels(each) - each.unsharded))


def _labels(factors: Factors) -> set[str]:
    return {
        label for dims in (*factors.operands, *factors.outputs) for term in dims for label in labels_in(term)
    }


if __name__ == "__main__":
    main()
