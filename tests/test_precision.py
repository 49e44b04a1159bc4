"""Another precision reaches everything that is floating point, and nothing else."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from meshloom.verify.reference.other_precision import convert, convert_model

CPU = torch.device("cpu")


class Pair(NamedTuple):
    a: torch.Tensor
    b: int


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    name: str


def test_containers_keep_their_kind():
    tree = {
        "pair": Pair(torch.ones(1), 2),
        "batch": Batch(torch.ones(1), "a"),
        "user": UserDict(x=torch.ones(1)),
        "list": [torch.arange(2), None],
    }
    converted = convert(tree, CPU, torch.float64)
    assert (
        converted["pair"].a.dtype
        == converted["batch"].x.dtype
        == converted["user"]["x"].dtype
        == torch.float64
    )
    assert (type(converted["pair"]), type(converted["batch"]), type(converted["user"])) == (
        Pair,
        Batch,
        UserDict,
    )
    assert converted["list"][0].dtype == torch.int64 and converted["batch"].name == "a"
    assert tree["batch"].x.dtype == torch.float32


def test_a_model_keeps_its_integers_its_ties_and_its_imaginary_parts():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].weight = model[1].weight
    model.register_buffer("turn", torch.ones(2, dtype=torch.complex64))
    converted = convert_model(model, CPU, torch.float64)
    assert converted[2].weight is converted[1].weight and converted[1].weight.dtype == torch.float64
    assert (
        converted[0].running_mean.dtype == torch.float64
        and converted[0].num_batches_tracked.dtype == torch.int64
    )
    assert converted.turn.is_complex()
