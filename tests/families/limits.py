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

# Why there is no program: in words, and a part of the sentence that says so. Export gives less than a program
# has to, and more than it may.
NOT_READ = {
    "deberta_v2": (
        "asks whether any label is set",
        r"modeling_deberta_v2.py:\d+ \(if label_index.size\(0\) > 0:\).* data-dependent expression",
    ),
    "longformer": (
        "asks whether any token has global attention",
        r"modeling_longformer.py:\d+ \(if is_global_attn:\).* data-dependent expression",
    ),
    "led": (
        "asks whether any token has global attention",
        r"modeling_led.py:\d+ \(if is_global_attn:\).* data-dependent expression",
    ),
    "prophetnet": (
        "asserts that all labels are positive",
        r"modeling_prophetnet.py:\d+ \(assert torch.all.* data-dependent expression",
    ),
    "autoformer": (
        "gets a mask only while it is traced, and that does not fit",
        r"modeling_autoformer.py:\d+ \(attn_weights = .* shape '\[3, 3, 10, 10\]' is invalid for input of size 540",
    ),
    "glpn": (
        "the loss is over as many pixels as have a depth",
        r"the result of aten.index.Tensor at .*modeling_glpn.py:\d+ .* depends on the values in the batch",
    ),
    "wav2vec2": (
        "asks whether a label exceeds the vocabulary",
        r"modeling_wav2vec2.py:\d+ \(if .* data-dependent expression",
    ),
    "vilt": (
        "interpolates to a size read from the mask of a picture",
        r"modeling_vilt.py:\d+ .* data-dependent expression",
    ),
    "batch_norm": (
        "a cumulative mean divides by a Python number read from a buffer",
        "Could not extract .* from data-dependent expression",
    ),
    "switch_transformers": (
        "its forward replaces a parameter by a cast one",
        r"modeling_switch_transformers.py:\d+ \(self.classifier = .* swap Linear",
    ),
}

# Transformers makes another mask while it is traced, so that attention runs another kernel: equal to
# float32's last bits, and under autocast to bfloat16's.
OTHER_KERNEL = {"beit", "t5", "umt5", "speech_to_text", "time_series_transformer"}
