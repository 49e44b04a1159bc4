"""Values come back from JSON as they were, types included."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from meshloom.checkpoint.json_values import NotPlainError, from_json, to_json

VALUES: list[Any] = [
    None,
    True,
    -3,
    0.1 + 0.2,
    5e-324,
    -math.inf,
    "text",
    [1, [2.5, None]],
    (0.9, (0.999,)),
    {1, 2},
    {"betas": (0.9, 0.999), 3: {"a": []}},
    Counter({4: 2}),
    {"float": 1.0, "tuple": [1]},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_round_trip(value: Any):
    back = from_json(json.loads(json.dumps(to_json(value), allow_nan=False)))
    assert back == value and type(back) is type(value)


def test_numbers_that_are_none_and_tensors():
    assert math.isnan(from_json(to_json(math.nan)))
    assert from_json(to_json(numpy.float64(0.1))) == 0.1
    for value in (
        torch.tensor(0.1),
        torch.tensor([1, 2]),
        torch.tensor([math.inf], dtype=torch.float64),
        torch.tensor(True),
    ):
        back = from_json(json.loads(json.dumps(to_json(value))))
        assert torch.equal(back, value) and back.dtype == value.dtype


def test_what_is_not_plain_is_named():
    with pytest.raises(NotPlainError, match=r"a\.b\[1\] is a Linear"):
        to_json({"a": {"b": [0, nn.Linear(1, 1)]}})
    with pytest.raises(NotPlainError, match="is no value that was written here"):
        from_json({"code": "x"})
