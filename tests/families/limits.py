"""What a family's own code does not allow, family by family: running in float64, and being exported."""

from __future__ import annotations

# Casts or makes tensors of float32 whatever the parameters are; verified in float32 instead.
FLOAT32_ONLY = {
    "autoformer": "its attention accumulates in tensors made with .float()",
    "switch_transformers": "its forward casts the router's parameters to float32",
}

# Why torch.export refuses: in words, and a part of its message.
NOT_EXPORTED = {
    "deberta_v2": ("asks whether any label is set", "data-dependent"),
    "longformer": ("asks whether any token has global attention", "data-dependent"),
    "led": ("asks whether any token has global attention", "data-dependent"),
    "prophetnet": ("asserts that all labels are positive", "data-dependent"),
    "time_series_transformer": ("a torch.distributions object checks its values", "data-dependent"),
    "autoformer": ("gets a mask only while it is traced, and that does not fit", "invalid for input"),
    "wav2vec2": ("asks whether a label exceeds the vocabulary", "data-dependent"),
    "hubert": ("aten._ctc_loss has an output whose shape depends on the labels", "_ctc_loss"),
    "vilt": ("interpolates to a size read from the mask of a picture", "data-dependent"),
    "batch_norm": ("a cumulative mean divides by a Python number read from a buffer", "data-dependent"),
    "switch_transformers": ("its forward replaces a parameter by a cast one", "swap"),
}
