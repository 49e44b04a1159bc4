"""What the ranks of a random program must have in the end: one process, plain torch, ranks in order."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from collective_programs import COMPLEX, INTEGERS, Call
from torch import Tensor

COMBINE: dict[str, Any] = {
    "sum": torch.add, "avg": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
}  # fmt: skip


def expected(call: Call, place: int) -> Tensor | None:
    """What rank `place` of the group receives, contiguous; None: nothing. It is to be equal, except that
    products of complex numbers may be rounded otherwise."""
    inputs = [call.input_of(each) for each in range(len(call.members))]
    match call.kind:
        case "all_reduce":
            return reduction(inputs, call.op)
        case "reduce":
            return reduction(inputs, call.op) if place == call.root else None
        case "reduce_scatter":
            return reduction([each.reshape(len(inputs), *call.shape)[place] for each in inputs], call.op)
        case "all_gather" | "gather":
            return (
                torch.stack(inputs).reshape(call.all_shape)
                if call.kind == "all_gather" or place == call.root
                else None
            )
        case "scatter":
            return inputs[call.root].reshape(len(inputs), *call.shape)[place]
        case "broadcast":
            return inputs[call.root]
        case "all_to_all":
            return torch.cat(
                [values.split(list(call.sizes[source]))[place] for source, values in enumerate(inputs)]
            )
        case "message":
            return inputs[call.root] if place == call.to else None
        case _:
            return None


def reduction(inputs: list[Tensor], op: str) -> Tensor:
    """In rank order; 16-bit floats are added up in float32 and rounded once, averages of whole numbers are
    cut off."""
    dtype = inputs[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total: Tensor = reduce(COMBINE[op], [each.to(wide) for each in inputs])
    if op == "avg" and dtype in INTEGERS:
        total = torch.div(total, len(inputs), rounding_mode="trunc")
    elif op == "avg" and dtype in COMPLEX:
        # part by part: torch's quotient of complex numbers is rounded twice
        total = torch.view_as_complex(torch.view_as_real(total) / len(inputs))
    elif op == "avg":
        total = total / len(inputs)
    return total.to(dtype)
