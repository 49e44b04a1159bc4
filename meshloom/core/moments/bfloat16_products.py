"""Whether a processor has instructions for products in bfloat16, or torch emulates them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from meshloom.core.precisions import PRECISIONS


def emulation_note(precision: str, devices: Iterable[torch.device]) -> str:
    """The sentence for a plan of this precision on these devices, where one of them is a CPU that has no such instructions; ""
    otherwise."""
    entry = PRECISIONS[precision]
    uses = "bfloat16" in (entry.autocast, entry.parameters)
    if not uses or all(each.type != "cpu" for each in devices) or has_bfloat16_products():
        return ""
    return (
        f"precision={precision}: this processor has no instructions for products in bfloat16, so torch emulates them, many times slower than float32. A few "
        "steps of a small model show what the precision does; for speed use a GPU, or a CPU with AVX-512 BF16 or AMX, or precision=float32."
    )


def has_bfloat16_products() -> bool:
    """Of this machine's processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
