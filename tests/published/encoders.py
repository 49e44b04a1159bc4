"""Encoders of text, which find hidden words, and models that write a text for another one."""

from __future__ import annotations

from typing import Any

from tests.published.model import Published, from_transformers, tokens


def _encoder(name: str, model: str, length: int = 512) -> Published:
    return from_transformers(
        name, "encoder", f"{length:,} tokens", model, tokens(length), chunk=4, dense=True
    )


def _translator(name: str, model: str, length: int, settings: dict[str, Any]) -> Published:
    size = f"{length:,} + {length:,} tokens"
    return from_transformers(
        name,
        "encoder, decoder",
        size,
        model,
        tokens(length),
        settings,
        chunk=4,
        dense=True,
    )


ENCODERS = [
    _encoder("bert-base", "BertForMaskedLM"),
    _encoder("deberta-base", "DebertaForMaskedLM"),
    _encoder("deberta-v2-xlarge", "DebertaV2ForMaskedLM"),
    _translator("t5-small", "T5ForConditionalGeneration", 512, {"decoder_start_token_id": 0}),
    _translator("bart-large", "BartForConditionalGeneration", 1024, {}),
]
