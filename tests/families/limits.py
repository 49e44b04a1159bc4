"""What a family's own code does not allow, family by family: running in float64, and being read."""

from __future__ import annotations

# Casts or makes tensors of float32 whatever the parameters are; verified in float32 instead.
FLOAT32_ONLY = {
    "autoformer": "its attention accumulates in tensors made with .float()",
    "switch_transformers": "its forward casts the router's parameters to float32",
}

# What there is no program of: a part of the sentence that says why.
NOT_READ = {
    # asks whether any label is set
    "deberta_v2": r"modeling_deberta_v2.py:\d+ \(if label_index.size\(0\) > 0:\).* data-dependent expression",
    # asks whether any token has global attention
    "longformer": r"modeling_longformer.py:\d+ \(if is_global_attn:\).* data-dependent expression",
    # asks whether any token has global attention
    "led": r"modeling_led.py:\d+ \(if is_global_attn:\).* data-dependent expression",
    # asserts that all labels are positive
    "prophetnet": r"modeling_prophetnet.py:\d+ \(assert torch.all.* data-dependent expression",
    # gets a mask only while it is traced, and that does not fit
    "autoformer": r"modeling_autoformer.py:\d+ \(attn_weights = .* shape '\[3, 3, 10, 10\]' is invalid for input of size 540",
    # the loss is over as many pixels as have a depth
    "glpn": r"the result of aten.index.Tensor at .*modeling_glpn.py:\d+ .* depends on the values in the batch",
    # asks whether a label exceeds the vocabulary
    "wav2vec2": r"modeling_wav2vec2.py:\d+ \(if .* data-dependent expression",
    # interpolates to a size read from the mask of a picture
    "vilt": r"modeling_vilt.py:\d+ .* data-dependent expression",
    # a cumulative mean divides by a Python number read from a buffer
    "batch_norm": "Could not extract .* from data-dependent expression",
    # its forward replaces a parameter by a cast one
    "switch_transformers": r"modeling_switch_transformers.py:\d+ \(self.classifier = .* swap Linear",
}

# Transformers makes another mask while it is traced, so that attention runs another kernel: equal to
# float32's last bits, and under autocast to bfloat16's.
OTHER_KERNEL = {"beit", "t5", "umt5", "speech_to_text", "time_series_transformer"}
