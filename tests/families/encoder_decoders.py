"""Encoder-decoders: one sequence read, another one written; time series among them."""

from __future__ import annotations

from typing import Any

import torch

from tests.families.family import NUM_SAMPLES, Family, from_transformers
from tests.families.samples import TOKENS, VOCABULARY, generator, some_classes, translations
from tests.jobs import Samples


def _translator(name: str, notes: str, model: str, settings: dict[str, Any]) -> Family:
    return from_transformers(
        name,
        "encoder-decoder",
        notes,
        model,
        translations,
        {**TOKENS, "decoder_start_token_id": 1, "use_cache": False, **settings},
    )


def _whole_texts() -> Samples:
    """Two texts without padding: the chunks of windows that see nothing but padding give NaN in float64, by
    the model's own casts."""
    tokens, answers = (
        torch.randint(3, VOCABULARY, (NUM_SAMPLES, length), generator=generator(23)) for length in (8, 5)
    )
    return Samples(input_ids=tokens, labels=answers)


def _series() -> Samples:
    """A past of 17 steps with one gap per sample and the 5 steps that follow, two features of the time of
    each."""
    source = generator(21)
    values = torch.randn(NUM_SAMPLES, 22, generator=source).cumsum(1)
    times = torch.randn(NUM_SAMPLES, 22, 2, generator=source)
    observed = torch.ones(NUM_SAMPLES, 17)
    observed[torch.arange(NUM_SAMPLES), torch.arange(NUM_SAMPLES) + 2] = 0
    return Samples(
        past_values=values[:, :17], past_time_features=times[:, :17], past_observed_mask=observed,
        future_values=values[:, 17:], future_time_features=times[:, 17:], static_categorical_features=some_classes(4)[:, None],
    )  # fmt: skip


def _channels() -> Samples:
    """Three channels of 20 steps, and the 4 that follow."""
    values = torch.randn(NUM_SAMPLES, 24, 3, generator=generator(22)).cumsum(1)
    return Samples(past_values=values[:, :20], future_values=values[:, 20:])


_BART: dict[str, Any] = {
    "d_model": 15, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3, "decoder_attention_heads": 3,
    "encoder_ffn_dim": 29, "decoder_ffn_dim": 23, "max_position_embeddings": 16, "forced_eos_token_id": None,
}  # fmt: skip
_SERIES: dict[str, Any] = {
    "prediction_length": 5, "context_length": 10, "lags_sequence": [1, 2, 7], "num_time_features": 2, "num_static_categorical_features": 1,
    "cardinality": [4], "embedding_dimension": [3], "d_model": 18, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 29, "decoder_ffn_dim": 23, "use_cache": False,
}  # fmt: skip

ENCODER_DECODERS = [
    _translator("t5", "relative positions in buckets, shared by the layers; RMS norms; unscaled attention", "T5ForConditionalGeneration",
                {"d_model": 15, "d_kv": 5, "d_ff": 29, "num_layers": 2, "num_heads": 3, "relative_attention_num_buckets": 8}),
    _translator("umt5", "relative positions in each layer; gated MLP; heads of another width than the model", "UMT5ForConditionalGeneration",
                {"d_model": 15, "d_kv": 7, "d_ff": 29, "num_layers": 2, "num_heads": 3, "relative_attention_num_buckets": 8}),
    _translator("bart", "learned positions; cross attention; one embedding for all", "BartForConditionalGeneration", _BART),
    _translator("pegasus", "sinusoidal positions; norms before the layers; a bias of the logits that is a buffer", "PegasusForConditionalGeneration",
                {**_BART, "d_model": 18}),
    _translator("prophetnet", "predicts two tokens ahead in two streams", "ProphetNetForConditionalGeneration",
                {"hidden_size": 15, "num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 3,
                 "num_decoder_attention_heads": 3, "encoder_ffn_dim": 29, "decoder_ffn_dim": 23, "max_position_embeddings": 16, "ngram": 2,
                 "num_buckets": 8, "relative_max_distance": 16, "disable_ngram_loss": False}),
    from_transformers("led", "encoder-decoder", "the encoder attends in overlapping chunks", "LEDForConditionalGeneration", _whole_texts,
                      {**TOKENS, **_BART, "decoder_start_token_id": 1, "use_cache": False, "attention_window": 4,
                       "max_encoder_position_embeddings": 16, "max_decoder_position_embeddings": 16}),
    from_transformers("time_series_transformer", "encoder-decoder", "lagged inputs, a scale per series; likelihood of a Student distribution",
                      "TimeSeriesTransformerForPrediction", _series, _SERIES),
    from_transformers("autoformer", "encoder-decoder", "autocorrelation by Fourier transforms; moving averages split off", "AutoformerForPrediction",
                      _series, {**_SERIES, "moving_average": 3, "label_length": 4}),
    from_transformers("patchtst", "encoder-decoder", "patches of a series, channels apart; batch norm over the width", "PatchTSTForPrediction",
                      _channels,
                      {"num_input_channels": 3, "context_length": 20, "patch_length": 4, "patch_stride": 4, "num_hidden_layers": 2, "d_model": 18,
                       "num_attention_heads": 3, "ffn_dim": 29, "prediction_length": 4, "norm_type": "batchnorm", "loss": "mse"}),
]  # fmt: skip
