"""Rules of a user's own operators: how they shard, and the errors for invalid ones."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from meshloom.core.errors import CaptureError
from meshloom.tensor_parallel.rules.table import rules_with
from tests.rule_calls import Chance, OneCall
from tests.rule_check import Checked, check_call


@torch.library.custom_op("meshloom_tests::gate", mutates_args=())
def gate(x: Tensor, y: Tensor) -> Tensor:
    return x * y


@gate.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


gate.register_autograd(
    lambda ctx, gradient: (gradient * ctx.saved_tensors[1], gradient * ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def check(text: str, name: str = "meshloom_tests::gate") -> Checked:
    checked = Checked()
    for seed in range(4):
        chance = Chance(seed)
        x = chance.normal(6, 5)
        one = OneCall(torch.ops.meshloom_tests.gate.default, (x, chance.normal(6, 5)))
        check_call(one, rules_with({name: text}), 2 + seed % 3, chance, checked)
    return checked


@pytest.mark.parametrize(
    ("text", "linear"),
    [("b* f, b* f -> b* f", False), ("m n, m n -> m n", False), ("b* f, b* f -> b* f; linear 0 1", True)],
)
def test_an_operator_with_a_rule_is_divided(text: str, linear: bool):
    checked = check(text)
    assert checked.with_cuts and bool(checked.partial) == linear


def test_a_dim_that_has_to_be_whole_is_not_cut():
    assert set(check("b f!, b f! -> b f!").labels) == {"b"}


def test_an_operator_without_a_rule_is_computed_by_every_rank():
    checked = check("b, b -> b", "meshloom_tests::other")
    assert checked.ways and not checked.with_cuts


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("gate", "b, b -> b", "its name is not an operator's, like mylib::swiglu"),
        ("meshloom_tests::gate", "b f, b f", "it needs exactly one -> between operands and results"),
        (
            "meshloom_tests::gate",
            "b f, b f -> b k",
            "'k' of the result occurs in no operand (write _ for a dim of its own)",
        ),
        ("meshloom_tests::gate", "b (f, b f -> b f", "'(' is not a label"),
        ("meshloom_tests::gate", "b f, b f -> b f; total f", "'total f' is not one of sum, add, linear"),
        ("meshloom_tests::gate", "b f, b f -> b f; sum k", "'k' is summed and occurs in no operand"),
        ("meshloom_tests::gate", "b f, b f -> b f; linear x", "'linear x' needs operands by number, from 0"),
    ],
)
def test_a_text_that_is_no_rule_is_refused_in_one_sentence(name: str, text: str, why: str):
    with pytest.raises(
        CaptureError,
        match=re.escape(f'The rule {name!r}: {text!r} is invalid: {why}. Write it like "mylib::swiglu"'),
    ):
        rules_with({name: text})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("b f -> b f", ": it has 1 operands, not 2"),
        ("b f, f b -> b f", ": f is 5 elsewhere and 6 in operand 1"),
        ("b f c, b f c -> b f c", ""),
        ("b f, b f -> b", ": result 0 has 2 dims, not 1"),
    ],
)
def test_a_rule_that_does_not_fit_the_call_says_why(text: str, why: str):
    expected = f"The rule of meshloom_tests::gate, {text!r}, does not fit its call on [6, 5], [6, 5], which gives [6, 5]{why}."
    with pytest.raises((CaptureError, AssertionError), match=re.escape(expected)):
        check(text)
