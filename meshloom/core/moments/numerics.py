"""torch's settings of this process that change what operators return: the same on all ranks, or ranks compute differently."""

from __future__ import annotations

from typing import Any

import torch


def numeric_settings() -> dict[str, str]:
    """By name, as text; settings that this version of torch lacks are left out.

    >>> numeric_settings()["deterministic algorithms"], numeric_settings()["float32 products"]
    ('False', 'highest')
    """
    backends: Any = torch.backends
    found = {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 products": torch.get_float32_matmul_precision(),
        "cuDNN deterministic": backends.cudnn.deterministic,
        "cuDNN benchmark": backends.cudnn.benchmark,
        "float32 products on GPUs": getattr(backends.cuda.matmul, "fp32_precision", None),
        "float32 convolutions on GPUs": getattr(
            getattr(backends.cudnn, "conv", None), "fp32_precision", None
        ),
        "reduced sums of bfloat16": backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "reduced sums of float16": backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    }
    return {name: str(value) for name, value in found.items() if value is not None}
