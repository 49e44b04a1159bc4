"""torch's settings of this process that change what operators return: the same on all ranks, or ranks compute differently."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_FAR, _NEAR = 6e-4, 1e-5  # of a product's norm: errors beyond are of bfloat16; of TF32; below, of float32


def numeric_settings() -> dict[str, str]:
    """By name, as text; settings that this version of torch lacks are left out.

    >>> numeric_settings()["deterministic algorithms"], numeric_settings()["float32 products"]
    ('False', 'highest')
    """
    backends: Any = torch.backends
    found = {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 products": torch.get_float32_matmul_precision(),
        "float32 products on CPUs": _of_part(backends.mkldnn, "matmul"),
        "float32 convolutions on CPUs": _of_part(backends.mkldnn, "conv"),
        "cuDNN deterministic": backends.cudnn.deterministic,
        "cuDNN benchmark": backends.cudnn.benchmark,
        "float32 products on GPUs": getattr(backends.cuda.matmul, "fp32_precision", None),
        "float32 convolutions on GPUs": _of_part(backends.cudnn, "conv"),
        "reduced sums of bfloat16": backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "reduced sums of float16": backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    }
    return {name: str(value) for name, value in found.items() if value is not None}


def rounded_products(device: torch.device) -> tuple[torch.dtype | None, torch.dtype | None]:
    """To what `device` rounds float32 values before it multiplies matrices, and before it convolves, under the settings of now:
    as it is found by doing so. float16 stands for TF32, which has as many digits; None: they are not rounded.

    >>> rounded_products(torch.device("cpu"))
    (None, None)
    """
    return _measured(device, tuple(numeric_settings().items()))


@lru_cache
def _measured(
    device: torch.device, settings: tuple[tuple[str, str], ...]
) -> tuple[torch.dtype | None, torch.dtype | None]:
    # as if at random, without a draw, which would be missing elsewhere
    numbers = torch.arange(2**14, dtype=torch.float64, device="cpu")
    one, other = ((numbers * step).sin().mul(43758.5).frac().float() for step in (12.9898, 78.233))
    with torch.no_grad():
        products = [
            (Tensor.matmul, one.reshape(128, 128), other.reshape(128, 128)),
            (functional.conv2d, one.reshape(4, 16, 16, 16), other[: 32 * 16 * 9].reshape(32, 16, 3, 3)),
        ]
        matrices, convolutions = (
            _rounded(product(a.to(device), b.to(device)), product(a.double(), b.double()))
            for product, a, b in products
        )
    return matrices, convolutions


def _rounded(found: Tensor, exact: Tensor) -> torch.dtype | None:
    error = float((found.cpu().double() - exact).norm() / exact.norm())
    return torch.bfloat16 if error > _FAR else torch.float16 if error > _NEAR else None


def _of_part(backend: Any, part: str) -> str | None:
    return getattr(getattr(backend, part, None), "fp32_precision", None)
