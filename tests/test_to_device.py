"""A batch of any build is moved whole, and keeps its build."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import torch
from torch.nn.utils.rnn import pack_sequence

from meshloom.data.to_device import to_device

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    names: list[str]


class Graph:
    def __init__(self, device="cpu"):
        self.device = device

    def to(self, device):
        return Graph(device)


def test_every_tensor_is_moved_and_the_build_is_kept():
    x = torch.ones(2)
    tree = {
        "list": [x, 1, "text", None],
        "pair": Pair(x, (x,)),
        "batch": Batch(x, ["a"]),
        "ordered": OrderedDict(a=x),
        "user": UserDict(a=x),
        "fixed": MappingProxyType({"a": x}),
        "graph": Graph(),
        "packed": pack_sequence([x]),
    }
    moved = to_device(tree, "meta")
    places = [
        moved["list"][0],
        moved["pair"].x,
        moved["pair"].y[0],
        moved["batch"].x,
        moved["ordered"]["a"],
        moved["user"]["a"],
        moved["fixed"]["a"],
    ]
    assert all(value.device.type == "meta" for value in places)
    assert (
        moved["list"][1:] == [1, "text", None]
        and moved["batch"].names == ["a"]
        and moved["graph"].device == "meta"
    )
    assert [type(moved[key]) for key in ("pair", "batch", "ordered", "user")] == [
        Pair,
        Batch,
        OrderedDict,
        UserDict,
    ]
    assert moved["packed"].data.device.type == "meta"
    assert tree["batch"].x is x and tree["user"]["a"] is x  # the original is left alone


def test_dtype_casts_floating_point_only():
    moved = to_device(
        [
            torch.ones(1),
            torch.ones(1, dtype=torch.bfloat16),
            torch.ones(1, dtype=torch.int64),
            torch.ones(1).bool(),
        ],
        "cpu",
        torch.float64,
    )
    assert [value.dtype for value in moved] == [torch.float64, torch.float64, torch.int64, torch.bool]
    assert to_device(pack_sequence([torch.ones(2)]), "cpu", torch.float64).data.dtype == torch.float64
    assert to_device(pack_sequence([torch.ones(2).long()]), "cpu", torch.float64).data.dtype == torch.int64


def test_what_is_already_there_is_not_copied():
    x = torch.ones(2)
    assert to_device(x, "cpu") is x


def test_what_has_no_tensors_stays():
    thing = SimpleNamespace(a=1)
    assert to_device(thing, "meta") is thing and to_device(Graph, "meta") is Graph
