"""Rules that a user writes: a custom operator's factor map as one line of text, checked with precise
errors."""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshloom.core.errors import CaptureError
from meshloom.tensor_parallel.rules.factors import Factors, factors_of_text, labels_in
from meshloom.tensor_parallel.rules.operator_call import Call, Rule, tensor_arguments

_LABEL = re.compile(r"_|[A-Za-z]\w*\*?!?")
_DIMS = re.compile(r"\([^()]*\)|[^\s()]+|[()]")
_CLAUSES = ("sum", "add", "linear")


def user_rules(texts: Mapping[str, str]) -> dict[str, Rule]:
    """The rules that texts describe, by operator. Raises `CaptureError` for an invalid text.

    >>> sorted(user_rules({"mylib::swiglu": "b* f, b* f -> b* f"}))
    ['mylib::swiglu']
    """
    return {name: _rule(name, text) for name, text in texts.items()}


def _rule(name: str, text: str) -> Rule:
    problem = (
        "its name is not an operator's, like mylib::swiglu"
        if not re.fullmatch(r"\w+::\w+", name)
        else _problem(text)
    )
    if problem:
        raise CaptureError(
            f'The rule {name!r}: {text!r} is invalid: {problem}. Write it like "mylib::swiglu": "b* f, b* f -> b* f".'
        )

    def rule(call: Call) -> Factors:
        try:
            factors = factors_of_text(text, list(tensor_arguments(call)), len(call.outputs))
            _check_fit(factors, call)
        except (ValueError, KeyError) as error:
            given = ", ".join(str(list(each.shape)) for each in call.operands)
            results = ", ".join(str(list(each.shape)) for each in call.outputs)
            why = f": {error.args[0]}" if isinstance(error, _MisfitError) else ""
            raise CaptureError(
                f"The rule of {name}, {text!r}, does not fit its call on {given}, which gives {results}{why}."
            ) from error
        return factors

    return rule


class _MisfitError(ValueError):
    pass


def _problem(text: str) -> str | None:
    """The mistake in a rule's text; None: it is valid."""
    body, *clauses = (part.strip() for part in text.split(";"))
    if body.count("->") != 1:
        return "it needs exactly one -> between operands and results"
    sides = [[_DIMS.findall(tensor) for tensor in side.split(",")] for side in body.split("->")]
    known: list[set[str]] = [set(), set()]
    for side, tensors in zip(known, sides, strict=True):
        for token in (each for tokens in tensors for each in tokens):
            inner = (
                re.split(r"[\s+]+", token[1:-1].strip())
                if token.startswith("(") and len(token) > 1
                else [token]
            )
            wrong = next((each for each in inner if not _LABEL.fullmatch(each)), None)
            if wrong is not None:
                return f"{wrong!r} is not a label"
            side.update(each.rstrip("!") for each in inner if each != "_")
    new = sorted(known[1] - known[0])
    if new:
        return f"{new[0]!r} of the result occurs in no operand (write _ for a dim of its own)"
    for clause in clauses:
        words = clause.split()
        if not words or words[0] not in _CLAUSES:
            return f"{clause!r} is not one of {', '.join(_CLAUSES)}"
        lost = [word for word in words[1:] if words[0] == "sum" and word not in known[0]]
        if lost:
            return f"{lost[0]!r} is summed and occurs in no operand"
        if words[0] != "sum" and not all(re.fullmatch(r"\d+(\+\d+)*", word) for word in words[1:]):
            return f"{clause!r} needs operands by number, from 0"
    return None


def _check_fit(factors: Factors, call: Call) -> None:
    """Raises `_MisfitError` if a call's dims or sizes contradict its rule."""
    sides = (("operand", factors.operands, call.operands), ("result", factors.outputs, call.outputs))
    for kind, mapped, given in sides:
        if len(mapped) != len(given):
            raise _MisfitError(f"it has {len(mapped)} {kind}s, not {len(given)}")
    for kind, mapped, given in sides:
        for place, (dims, each) in enumerate(zip(mapped, given, strict=True)):
            if len(dims) != len(each.shape):
                raise _MisfitError(f"{kind} {place} has {len(each.shape)} dims, not {len(dims)}")
            for term, size in zip(dims, each.shape, strict=True):
                if isinstance(term, str) and factors.sizes[term] != size:
                    raise _MisfitError(
                        f"{term} is {factors.sizes[term]} elsewhere and {size} in {kind} {place}"
                    )
                if not factors.sizes.keys() >= set(labels_in(term)):
                    raise _MisfitError(f"no dim gives the sizes of {' and '.join(labels_in(term))}")
