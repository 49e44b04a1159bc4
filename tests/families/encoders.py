"""Encoders: models that read a whole text at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.families.family import Family, from_transformers
from tests.families.samples import TOKENS, VOCABULARY, hidden_words, texts_in_classes
from tests.jobs import Samples


def _encoder(
    name: str,
    notes: str,
    model: str,
    settings: dict[str, Any],
    *,
    samples: Callable[[], Samples] = hidden_words,
    config: str | None = None,
) -> Family:
    return from_transformers(name, "encoder", notes, model, samples, {**TOKENS, **settings}, config=config)


def _without_mask(samples: Samples) -> Samples:
    return Samples(**{name: values for name, values in samples.fields.items() if name != "attention_mask"})


_BERT: dict[str, Any] = {
    "hidden_size": 15, "intermediate_size": 29, "num_hidden_layers": 2, "num_attention_heads": 3, "max_position_embeddings": 17, "type_vocab_size": 2,
}  # fmt: skip
_EVEN: dict[str, Any] = {**_BERT, "hidden_size": 24}

ENCODERS = [
    _encoder("bert", "learned positions; norms behind the layers", "BertForMaskedLM", _BERT),
    _encoder("distilbert", "no token types; classes of texts", "DistilBertForSequenceClassification",
             {"dim": 15, "hidden_dim": 29, "n_layers": 2, "n_heads": 3, "max_position_embeddings": 17, "num_labels": 3}, samples=texts_in_classes),
    _encoder("albert", "one layer's parameters used three times; a factorised embedding", "AlbertForMaskedLM",
             {**_BERT, "num_hidden_layers": 3, "embedding_size": 9}),
    _encoder("electra", "an embedding narrower than the layers; classes of tokens", "ElectraForTokenClassification",
             {**_BERT, "embedding_size": 9, "num_labels": VOCABULARY}),
    _encoder("deberta_v2", "disentangled attention: words and positions apart", "DebertaV2ForSequenceClassification",
             {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "num_labels": 3, "max_relative_positions": 8,
              "position_biased_input": False}, samples=texts_in_classes),
    _encoder("mpnet", "learned relative positions shared by the layers", "MPNetForMaskedLM", _BERT),
    _encoder("modernbert", "rotary positions; gated MLP; a window in one of two layers", "ModernBertForMaskedLM",
             {**_EVEN, "global_attn_every_n_layers": 2, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}),
    _encoder("convbert", "attention beside convolutions whose kernels are computed", "ConvBertForMaskedLM",
             {**_BERT, "hidden_size": 24, "num_attention_heads": 4, "embedding_size": 9, "conv_kernel_size": 3}),
    _encoder("fnet", "a Fourier transform instead of attention", "FNetForSequenceClassification", {**_BERT, "num_labels": 3},
             samples=lambda: _without_mask(texts_in_classes())),
    _encoder("funnel", "pools the sequence between blocks and restores it", "FunnelForMaskedLM",
             {"d_model": 18, "d_head": 6, "n_head": 3, "d_inner": 29, "block_sizes": [1, 1], "num_decoder_layers": 1}, samples=lambda: hidden_words(8)),
    _encoder("squeezebert", "grouped convolutions instead of matrices", "SqueezeBertForMaskedLM",
             {**_BERT, "embedding_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}),
    _encoder("esm", "rotary positions; masked tokens change the scale of the embedding", "EsmForMaskedLM",
             {**_BERT, "hidden_size": 24, "position_embedding_type": "rotary", "mask_token_id": 1, "token_dropout": True}),
    _encoder("roformer", "rotary positions computed from sinusoids", "RoFormerForMaskedLM", {**_BERT, "hidden_size": 24, "embedding_size": 9}),
    _encoder("longformer", "attention in overlapping chunks, padded to windows", "LongformerForSequenceClassification",
             {**_BERT, "attention_window": 4, "num_labels": 3}, samples=texts_in_classes),
    _encoder("xlm_roberta_xl", "norms before the layers; positions counted from the padding", "XLMRobertaXLForMaskedLM", _BERT),
]  # fmt: skip
