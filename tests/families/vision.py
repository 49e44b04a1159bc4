"""Vision: transformers with and without windows, convolutional networks, segmentation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.families.family import Family, from_transformers
from tests.families.samples import NUM_SAMPLES, generator, pictures, pictures_in_classes, pictures_in_parts
from tests.jobs import Samples


def _vision(
    name: str,
    notes: str,
    model: str,
    settings: dict[str, Any],
    *,
    height: int = 21,
    width: int | None = None,
    samples: Callable[[], Samples] | None = None,
) -> Family:
    """`height` x `width` pictures of five classes unless `samples` says otherwise."""
    pixels = samples or (lambda: pictures_in_classes(height, width or height))
    return from_transformers(name, "vision", notes, model, pixels, {"num_labels": 5, **settings})


def _parts(name: str, notes: str, model: str, settings: dict[str, Any], *, size: int) -> Family:
    return from_transformers(
        name,
        "segmentation",
        notes,
        model,
        lambda: pictures_in_parts(size, size),
        {"num_labels": 5, **settings},
    )


def _masked_patches() -> Samples:
    """Pictures of 5 x 5 patches of 4 x 4; every third patch is hidden, and all have a number to be found."""
    hidden = torch.arange(25) % 3 == 0
    return Samples(pixel_values=pictures(20, 20), bool_masked_pos=hidden.expand(NUM_SAMPLES, 25))


def _depths() -> Samples:
    """Pictures with a depth per pixel."""
    return Samples(
        pixel_values=pictures(32, 32), labels=torch.rand(NUM_SAMPLES, 32, 32, generator=generator(31))
    )


_VIT: dict[str, Any] = {
    "hidden_size": 15,
    "intermediate_size": 29,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 21,
    "patch_size": 7,
}
_PYRAMID: dict[str, Any] = {
    "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [6, 10], "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
}  # fmt: skip

VISION = [
    _vision("vit", "patches by a convolution; a class token", "ViTForImageClassification", _VIT),
    _vision("deit", "a second token for distillation; hidden patches to be restored", "DeiTForMaskedImageModeling",
            {**_VIT, "image_size": 20, "patch_size": 4, "encoder_stride": 4}, samples=_masked_patches),
    _vision("beit", "relative positions by pair of patches; scaled layers; mean pooling", "BeitForImageClassification",
            {**_VIT, "use_relative_position_bias": True, "layer_scale_init_value": 0.5}),
    _vision("dinov2", "scaled layers; gated MLP", "Dinov2ForImageClassification", {**_VIT, "use_swiglu_ffn": True, "layerscale_value": 0.7}),
    _vision("vit_mae", "most patches hidden by noise drawn in every step", "ViTMAEForPreTraining",
            {**_VIT, "decoder_hidden_size": 12, "decoder_num_attention_heads": 3, "decoder_num_hidden_layers": 2, "decoder_intermediate_size": 17},
            samples=lambda: Samples(pixel_values=pictures(21, 21))),
    _vision("swin", "windows, shifted in every second layer; patches merged", "SwinForImageClassification",
            {"image_size": 24, "patch_size": 2, "embed_dim": 6, "depths": [2, 2], "num_heads": [2, 3], "window_size": 3, "mlp_ratio": 2.0}, height=24),
    _vision("swinv2", "cosine attention in windows; positions through an MLP", "Swinv2ForImageClassification",
            {"image_size": 24, "patch_size": 2, "embed_dim": 6, "depths": [2, 2], "num_heads": [2, 3], "window_size": 3, "mlp_ratio": 2.0}, height=24),
    _vision("hiera", "attention within units, pooled queries", "HieraForImageClassification",
            {"image_size": [16, 16], "patch_size": [3, 3], "patch_stride": [2, 2], "patch_padding": [1, 1], "embed_dim": 6, "depths": [1, 1],
             "num_heads": [1, 2], "num_query_pool": 1, "masked_unit_size": [4, 4], "masked_unit_attention": [True, False], "mlp_ratio": 2.0,
             "query_stride": [2, 2]}, height=16),
    _vision("pvt", "keys and values of a smaller picture", "PvtForImageClassification",
            {**_PYRAMID, "image_size": 32, "patch_sizes": [4, 2], "strides": [4, 2], "sequence_reduction_ratios": [2, 1]}, height=32),
    _vision("cvt", "projections by convolutions with batch norm", "CvtForImageClassification",
            {"embed_dim": (6, 9), "num_heads": (1, 3), "depth": (1, 2), "patch_sizes": (7, 3), "patch_stride": (4, 2), "patch_padding": (2, 1),
             "mlp_ratio": (2.0, 2.0), "attention_drop_rate": (0.0, 0.0), "drop_rate": (0.0, 0.0), "drop_path_rate": (0.0, 0.0),
             "qkv_bias": (True, True), "cls_token": (False, True), "qkv_projection_method": ("dw_bn", "dw_bn"), "kernel_qkv": (3, 3),
             "padding_kv": (1, 1), "stride_kv": (2, 2), "padding_q": (1, 1), "stride_q": (1, 1)}, height=27),
    _vision("poolformer", "pooling instead of attention; group norms", "PoolFormerForImageClassification",
            {"num_encoder_blocks": 2, "depths": [1, 2], "hidden_sizes": [6, 11], "patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1],
             "layer_scale_init_value": 0.5, "mlp_ratio": 2.0}, height=27, width=35),
    _vision("focalnet", "focal modulation: gated sums over growing surroundings", "FocalNetForImageClassification",
            {"image_size": 20, "patch_size": 4, "embed_dim": 7, "hidden_sizes": [7, 14], "depths": [1, 2], "focal_levels": [2, 2],
             "focal_windows": [3, 3], "mlp_ratio": 2.0}, height=20),
    _vision("convnext", "depthwise 7 x 7 convolutions; layer norms over channels", "ConvNextForImageClassification",
            {"num_stages": 2, "hidden_sizes": [7, 11], "depths": [1, 2], "layer_scale_init_value": 0.5}, height=27, width=35),
    _vision("convnextv2", "global response normalisation", "ConvNextV2ForImageClassification",
            {"num_stages": 2, "hidden_sizes": [7, 11], "depths": [1, 2]}, height=27, width=35),
    _vision("resnet", "bottlenecks with batch norm", "ResNetForImageClassification",
            {"embedding_size": 7, "hidden_sizes": [12, 20], "depths": [1, 2]}, height=27, width=35),
    _vision("regnet", "grouped convolutions; squeeze and excitation", "RegNetForImageClassification",
            {"embedding_size": 6, "hidden_sizes": [8, 12], "depths": [1, 2], "groups_width": 4}, height=27, width=35),
    _vision("mobilenet_v2", "inverted residuals; uneven padding", "MobileNetV2ForImageClassification",
            {"depth_multiplier": 0.1, "depth_divisible_by": 2, "min_depth": 4, "expand_ratio": 2.0, "image_size": 64}, height=64),
    _vision("efficientnet", "depthwise convolutions; squeeze and excitation; running statistics renewed at once", "EfficientNetForImageClassification",
            {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 1.0, "depth_divisor": 2, "kernel_sizes": [3, 5], "in_channels": [32, 16],
             "out_channels": [16, 24], "strides": [1, 2], "num_block_repeats": [1, 2], "expand_ratios": [1, 2], "hidden_dim": 320}, height=32),
    _vision("mobilevit", "convolutions and attention over unfolded patches", "MobileViTForImageClassification",
            {"image_size": 64, "hidden_sizes": [12, 15, 18], "neck_hidden_sizes": [4, 6, 8, 10, 12, 14, 16], "num_attention_heads": 3,
             "expand_ratio": 2.0}, height=64),
    _parts("segformer", "overlapping patches; a class per pixel by an all-MLP head", "SegformerForSemanticSegmentation",
           {**_PYRAMID, "sr_ratios": [2, 1], "decoder_hidden_size": 7}, size=32),
    _vision("glpn", "a depth per pixel; features of two scales weighed against each other", "GLPNForDepthEstimation",
            {**_PYRAMID, "num_encoder_blocks": 4, "depths": [1, 1, 1, 1], "hidden_sizes": [6, 8, 10, 12], "patch_sizes": [7, 3, 3, 3],
             "strides": [4, 2, 2, 2], "num_attention_heads": [1, 2, 2, 3], "mlp_ratios": [2, 2, 2, 2], "sr_ratios": [4, 2, 1, 1],
             "decoder_hidden_size": 6}, samples=_depths),
    _parts("dpt", "features of four layers put together at four scales", "DPTForSemanticSegmentation",
           {**_VIT, "num_hidden_layers": 4, "image_size": 32, "patch_size": 8, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [4, 6, 8, 10],
            "fusion_hidden_size": 6}, size=32),
]  # fmt: skip
