"""Multimodal: pictures and words in one model, compared with each other or read together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.families.family import NUM_SAMPLES, Family, from_transformers
from tests.families.samples import (
    LENGTH,
    TOKENS,
    VOCABULARY,
    generator,
    labelled,
    pictures,
    some_classes,
    words,
)
from tests.jobs import Samples

PICTURE = VOCABULARY - 1  # the token in whose place a picture stands


def _multimodal(
    name: str,
    notes: str,
    model: str,
    settings: dict[str, Any],
    samples: Callable[[], Samples],
    loss: Callable[[Any, Any], Any] | None = None,
) -> Family:
    return from_transformers(name, "multimodal", notes, model, samples, settings, loss=loss)


def _pairs(size: int = 21) -> Samples:
    """Pictures, each with a text that ends with the token of the end."""
    tokens, mask = words(13)
    tokens[torch.arange(NUM_SAMPLES), mask.sum(1) - 1] = TOKENS["eos_token_id"]
    return Samples(input_ids=tokens, attention_mask=mask, pixel_values=pictures(size, size))


def _compared(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The contrastive loss: every text against every picture of the batch."""
    return model(**batch, return_loss=True).loss


def _described(pictures_in_front: int, size: int = 21) -> Samples:
    """Texts to be continued, in front of which stand the tokens of a picture."""
    tokens, mask = words(14, LENGTH, PICTURE)
    front = torch.full((NUM_SAMPLES, pictures_in_front), PICTURE)
    tokens, mask = torch.cat([front, tokens], 1), torch.cat([torch.ones_like(front), mask], 1)
    return Samples(
        input_ids=tokens,
        attention_mask=mask,
        pixel_values=pictures(size, size),
        labels=labelled(tokens, mask * (tokens != PICTURE)),
    )


def _asked() -> Samples:
    """Questions on pictures; an answer has a score for each of 5 words."""
    fields = _pairs().fields
    return Samples(
        **fields,
        pixel_mask=torch.ones(NUM_SAMPLES, 21, 21).long(),
        labels=torch.rand(NUM_SAMPLES, 5, generator=generator(41)),
    )


def _regions() -> Samples:
    """Texts with four regions of a picture as vectors of 9, and a class."""
    tokens, mask = words(15)
    seen = torch.randn(NUM_SAMPLES, 4, 9, generator=generator(42))
    return Samples(input_ids=tokens, attention_mask=mask, visual_embeds=seen, visual_attention_mask=torch.ones(NUM_SAMPLES, 4),
                   visual_token_type_ids=torch.ones(NUM_SAMPLES, 4).long(), labels=some_classes(3))  # fmt: skip


def _pages() -> Samples:
    """Words with their boxes on a page, and a class each."""
    tokens, mask = words(16)
    corners = torch.randint(0, 9, (NUM_SAMPLES, LENGTH, 2), generator=generator(43))
    sizes = torch.randint(1, 9, (NUM_SAMPLES, LENGTH, 2), generator=generator(44))
    labels = labelled(tokens % 4, mask)
    return Samples(
        input_ids=tokens, attention_mask=mask, bbox=torch.cat([corners, corners + sizes], 2), labels=labels
    )


def _parts_by_words() -> Samples:
    """Pictures, words and which pixels they mean."""
    labels = torch.randint(2, (NUM_SAMPLES, 28, 28), generator=generator(45)).float()
    return Samples(**_pairs(28).fields, labels=labels)


def _letters() -> Samples:
    """Pictures and the words in them."""
    return Samples(pixel_values=pictures(21, 21), labels=labelled(*words(17, 5)))


_LAYERS: dict[str, Any] = {
    "hidden_size": 15,
    "intermediate_size": 29,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}
_TEXT: dict[str, Any] = {**_LAYERS, **TOKENS, "max_position_embeddings": 11}
_PICTURE: dict[str, Any] = {**_LAYERS, "hidden_size": 18, "image_size": 21, "patch_size": 7}
_LLAMA: dict[str, Any] = {
    **TOKENS, **_LAYERS, "model_type": "llama", "hidden_size": 24, "num_key_value_heads": 1, "max_position_embeddings": 32, "use_cache": False,
}  # fmt: skip

MULTIMODAL = [
    _multimodal("clip", "texts against pictures over the whole batch", "CLIPModel",
                {"text_config": _TEXT, "vision_config": _PICTURE, "projection_dim": 7}, _pairs, _compared),
    _multimodal("siglip", "pairs by a sigmoid; pictures pooled by attention", "SiglipModel",
                {"text_config": {**_TEXT, "hidden_size": 18, "projection_size": 18}, "vision_config": _PICTURE}, _pairs, _compared),
    _multimodal("blip", "texts continued with cross attention to a picture", "BlipForConditionalGeneration",
                {"text_config": {**_TEXT, "encoder_hidden_size": 18, "projection_dim": 7, "use_cache": False},
                 "vision_config": {**_PICTURE, "initializer_range": 0.2}, "projection_dim": 7, "image_text_hidden_size": 9},
                lambda: Samples(**(pairs := _pairs().fields), labels=labelled(pairs["input_ids"], pairs["attention_mask"]))),
    _multimodal("clipseg", "pixels that a text means: features of a picture conditioned on it", "CLIPSegForImageSegmentation",
                {"text_config": _TEXT, "vision_config": {**_PICTURE, "image_size": 28}, "projection_dim": 7, "extract_layers": [0, 1],
                 "reduce_dim": 6, "decoder_num_attention_heads": 3, "decoder_intermediate_size": 11}, _parts_by_words),
    _multimodal("llava", "a picture's patches in the place of its tokens", "LlavaForConditionalGeneration",
                {"text_config": _LLAMA, "vision_config": {**_PICTURE, "model_type": "clip_vision_model"}, "image_token_index": PICTURE,
                 "image_token_id": PICTURE, "vision_feature_layer": -1, "image_seq_length": 9}, lambda: _described(9)),
    _multimodal("git", "a picture in front of the text, one attention over both", "GitForCausalLM",
                {**_TEXT, "vision_config": _PICTURE, "use_cache": False},
                lambda: Samples(**(pairs := _pairs().fields), labels=labelled(pairs["input_ids"], pairs["attention_mask"]))),
    _multimodal("vilt", "words and patches in one encoder", "ViltForQuestionAnswering",
                {**_TEXT, "image_size": 21, "patch_size": 7, "num_labels": 5}, _asked),
    _multimodal("visual_bert", "regions of a picture behind the words", "VisualBertForVisualReasoning",
                {**_TEXT, "visual_embedding_dim": 9, "num_labels": 3}, _regions),
    _multimodal("layoutlm", "words with boxes on a page: six embeddings summed", "LayoutLMForTokenClassification",
                {**_TEXT, "max_2d_position_embeddings": 32, "num_labels": 4}, _pages),
    _multimodal("vision_encoder_decoder", "an encoder of pictures and a decoder of words, two configurations joined", "VisionEncoderDecoderModel",
                {"encoder": {**_PICTURE, "model_type": "vit"}, "pad_token_id": 0, "decoder_start_token_id": 1,
                 "decoder": {**_TEXT, "model_type": "bert", "is_decoder": True, "add_cross_attention": True, "use_cache": False}}, _letters),
]  # fmt: skip
