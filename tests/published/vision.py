"""Vision: transformers with and without windows, convolutional networks, segmentation; and pictures compared
with words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshloom.core.job_functions import Loss
from tests.published.model import Make, Published, from_transformers, pictures, published


def _vision(
    name: str,
    model: str,
    size: int,
    settings: dict[str, Any] | None = None,
    *,
    labels: tuple[int, ...] = (),
    chunk: int = 16,
    dense: bool = False,
) -> Published:
    settings = {"num_labels": 1000, **(settings or {})}
    return from_transformers(
        name,
        "vision",
        f"{size} x {size}",
        model,
        pictures(size, size, *labels),
        settings,
        chunk=chunk,
        dense=dense,
    )


def _captions(samples: int) -> dict[str, Tensor]:
    """Pictures and 77 tokens about each."""
    return {
        "pixel_values": pictures(224, 224)(samples)["pixel_values"],
        "input_ids": torch.ones(samples, 77, dtype=torch.long),
    }


def _contrast(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    return model(**batch, return_loss=True).loss


def _clip() -> nn.Module:
    import transformers  # here, because listing the set need not wait for it

    return transformers.CLIPModel(transformers.CLIPConfig())


_CLIP: Make = _captions

VISION = [
    _vision("vit-b/16", "ViTForImageClassification", 224, dense=True),
    _vision("dinov2-base", "Dinov2ForImageClassification", 224, dense=True),
    _vision("swin-tiny", "SwinForImageClassification", 224),
    _vision("convnext-tiny", "ConvNextForImageClassification", 224),
    _vision("resnet-50", "ResNetForImageClassification", 224),
    _vision(
        "segformer-b0",
        "SegformerForSemanticSegmentation",
        512,
        {"num_labels": 150},
        labels=(512, 512),
        chunk=4,
    ),
    published(
        "clip-b/32",
        "vision and text",
        "224 x 224, 77 tokens",
        _clip,
        _CLIP,
        chunk=16,
        loss=_contrast,
        dense=True,
    ),
]
