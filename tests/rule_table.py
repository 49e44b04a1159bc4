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
HEADER = """# Rules: what of an operator may be cut

A rule says which dims of an operator's tensors are one axis, in the manner of einsum. From it follow how the ranks may divide a call
among them, what gradients are, and what is sent where placements change; `tests/test_rules.py` runs every rule on random calls, with every
cut it allows, over 2 to 4 ranks, forward and backward, against the undivided call.

    linear       b* k, o k, o -> b* o; sum k; add 2
    view         b (h d) -> b h d
    split        b (q+k+v) -> b q, b k, b v

- One label is one axis: a rank that has some of its indices in one tensor has the same in the others. Any axis may be cut, but for those marked `!`,
  which have to be whole, and `_`, which is whole and nobody else's.
- `(h d)` is a dim made of two, outermost first; `(q+k)` one after another. `b*` is any number of leading dims.
- A label after `sum` is summed over: if it is cut, every rank has a result of full shape, and they add up to the result. Operands
  after `add` (by number, from 0) are added to such a sum, and so are given to it as parts of a sum, too.
- `linear 0+2 1+2` says that the result is a sum wherever those operands are, by itself and without being asked to be.
- *together* names an axis over which the ranks talk inside the operator: all have the whole result then, or (in parts) each its part of it.
- *t goes with e*: which rows belong to which expert is in the data. If the parameter's experts e are cut, every rank works on the rows t that are sent
  to its own, however many these are; cut by themselves they are not.
- `{b h}` is an operand that may have a cut axis in its other dims, too, and is then needed whole: the state of a recurrent cell, every rank computing
  some of its hidden units.

Where the rows and columns of one matrix turn out to be the same axis (x + W x, a state that W makes anew), the columns are made an axis of their
own, and the matrix is divided by its rows: every rank needs all of x for that.

An operator without a rule is computed by every rank, from all of its operands.

## Your own operators

`Job(rules={"mylib::swiglu": "b* f, b* f -> b* f"})` gives an operator of `torch.library` a rule, by its name and in this form: all
tensor arguments in the order of its schema, then its results. The call is made with a rank's parts as it is, so a size among its arguments has
to be of a dim that is whole. A rule that is not true of the operator gives wrong results; `meshloom verify` finds it.
`examples/07_own_operator.py` does it.

## Operators

The map of one call of each; the dims of another follow its shapes and arguments. Operators that torch calls pointwise, and that draw nothing at
random, have the map of `gelu` without an entry here.

| operators | map | summed | together |
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
        together = " ".join(
            [*sorted(factors.joins), *(f"{label} (in parts)" for label in sorted(factors.talks))]
        )
        together += f"{factors.routed.rows} goes with {factors.routed.groups}" if factors.routed else ""
        rows.setdefault((text, summed, together), []).append(name)
    lines = [
        f"| {', '.join(f'`{name}`' for name in names)} | `{text}` | {summed} | {together} |"
        for (text, summed, together), names in rows.items()
    ]
    return HEADER + "\n".join(lines) + "\n"


def _example(name: str) -> Factors:
    """The map of the call, among a few, in which most axes may be cut."""
    found: list[Factors] = []
    for seed in range(8):
        program, _ = program_of(CALLS[name][0](Chance(seed)))
        mapped = layout_of(program, BUILT_IN).mapped.get(program.nodes[0].name)
        if mapped is not None:
            found.append(mapped.factors)
    return max(found, key=lambda each: len(_labels(each) - each.whole))


def _labels(factors: Factors) -> set[str]:
    return {
        label for dims in (*factors.operands, *factors.outputs) for term in dims for label in labels_in(term)
    }


if __name__ == "__main__":
    main()
