"""Speech: encoders of waves and of spectra, with letters, words or classes to be found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from tests.families.family import Family, from_transformers
from tests.families.samples import TOKENS, labelled, some_classes, sound, spectra, words
from tests.jobs import Samples

WAVE = 211


def _speech(
    name: str, notes: str, model: str, settings: dict[str, Any], samples: Callable[[], Samples]
) -> Family:
    return from_transformers(name, "speech", notes, model, samples, settings)


def _spoken(letters: int = 5) -> Samples:
    """Waves and up to `letters` letters of 11, to be aligned by the loss."""
    return Samples(input_values=sound(WAVE), labels=labelled(*words(11, letters, 11)))


def _aligned_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """CTC over all frames, each label of full length."""
    scores = model(batch["input_values"]).logits.log_softmax(2).transpose(0, 1)
    frames, samples = scores.shape[:2]
    return F.ctc_loss(scores, batch["labels"], [frames] * samples, [batch["labels"].shape[1]] * samples)


def _classes() -> Samples:
    """Waves with a class each."""
    return Samples(input_values=sound(WAVE), labels=some_classes(3))


def _dictated(bands: int, frames: int) -> Samples:
    """Spectra [bands, frames] and the words in them."""
    return Samples(input_features=spectra(bands, frames), labels=labelled(*words(12, 6)))


_WAVES: dict[str, Any] = {
    "vocab_size": 11, "pad_token_id": 0, "hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 2, "num_attention_heads": 3,
    "conv_dim": (6, 9, 7), "conv_stride": (5, 2, 1), "conv_kernel": (10, 3, 2), "num_conv_pos_embeddings": 5, "num_conv_pos_embedding_groups": 3,
    "apply_spec_augment": False, "ctc_loss_reduction": "mean", "classifier_proj_size": 13, "num_labels": 3,
}  # fmt: skip
_DECODED: dict[str, Any] = {
    **TOKENS, "decoder_start_token_id": 1, "use_cache": False, "d_model": 18, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_ffn_dim": 29, "decoder_ffn_dim": 23,
}  # fmt: skip

SPEECH = [
    _speech("wav2vec2", "convolutions with a group norm; weight-normalised positions; CTC", "Wav2Vec2ForCTC", _WAVES, _spoken),
    from_transformers("hubert", "speech", "layer norms in the convolutions, norms before the layers; CTC written in the job", "HubertForCTC",
                      lambda: Samples(input_values=sound(WAVE), labels=words(11, 4, 11)[0].clamp(min=1)),
                      {**_WAVES, "feat_extract_norm": "layer", "do_stable_layer_norm": True}, loss=_aligned_loss),
    _speech("wavlm", "relative positions gated by the queries; classes of waves", "WavLMForSequenceClassification",
            {**_WAVES, "num_buckets": 8, "max_bucket_distance": 20}, _classes),
    _speech("sew", "frames squeezed before the layers and spread out behind them", "SEWForSequenceClassification", {**_WAVES, "squeeze_factor": 2},
            _classes),
    _speech("wav2vec2_conformer", "convolution and attention in each layer, relative positions; batch norm", "Wav2Vec2ConformerForSequenceClassification",
            {**_WAVES, "conv_depthwise_kernel_size": 3, "max_source_positions": 64}, _classes),
    _speech("whisper", "spectra by two convolutions; fixed positions there, learned ones in the decoder", "WhisperForConditionalGeneration",
            {**_DECODED, "num_mel_bins": 7, "max_source_positions": 13, "max_target_positions": 11, "begin_suppress_tokens": None},
            lambda: _dictated(7, 26)),
    _speech("speech_to_text", "gated convolutions in front; sinusoidal positions", "Speech2TextForConditionalGeneration",
            {**_DECODED, "conv_kernel_sizes": (3, 3), "conv_channels": 10, "input_feat_per_channel": 7, "max_source_positions": 40,
             "max_target_positions": 11}, lambda: _dictated(21, 7)),
    _speech("moonshine", "waves by strided convolutions; rotary positions", "MoonshineForConditionalGeneration",
            {**TOKENS, "decoder_start_token_id": 1, "use_cache": False, "hidden_size": 24, "intermediate_size": 29, "encoder_num_hidden_layers": 2,
             "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 3, "decoder_num_attention_heads": 3, "max_position_embeddings": 64},
            lambda: Samples(input_values=sound(1600), labels=labelled(*words(12, 6)))),
    _speech("audio_spectrogram_transformer", "overlapping patches of a spectrum", "ASTForAudioClassification",
            {"hidden_size": 15, "intermediate_size": 29, "num_hidden_layers": 2, "num_attention_heads": 3, "patch_size": 5, "frequency_stride": 3,
             "time_stride": 4, "max_length": 17, "num_mel_bins": 11, "num_labels": 4},
            lambda: Samples(input_values=spectra(17, 11), labels=some_classes(4))),
]  # fmt: skip
