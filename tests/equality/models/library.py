"""Models of transformers, built from small configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.equality.model import Model, Samples, normal, whole


def from_config(model: str, **settings: Any) -> Callable[[], nn.Module]:
    """What builds the class of this name, with a random start from its configuration."""

    def build() -> nn.Module:
        import transformers  # here, because tests that use none need not wait for it

        kind = getattr(transformers, model)
        built = kind(kind.config_class(**settings))
        for parameter in built.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.2)
        return built

    return build


def labelled(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that the model computes when it is given labels."""
    return model(**batch).loss


def tokens(vocabulary: int, length: int, seed: int, names: tuple[str, ...] = ("input_ids", "labels")) -> Any:
    """Tokens under each of the names, the same ones."""

    def build(count: int) -> Samples:
        return Samples(**dict.fromkeys(names, whole(seed, vocabulary, count, length)))

    return build


def translations(count: int) -> Samples:
    return Samples(input_ids=whole(110, 17, count, 5), labels=whole(111, 17, count, 4))


def pictures(count: int) -> Samples:
    return Samples(pixel_values=normal(112, count, 1, 6, 6), labels=whole(113, 2, count))


def sentences(count: int) -> Samples:
    there = (torch.arange(6) <= whole(115, 6, count, 1)).long()
    return Samples(input_ids=whole(114, 19, count, 6), attention_mask=there, labels=whole(116, 3, count))


LIBRARY = [
    Model(
        name="gpt2",
        interacts=True,
        features="transformers: GPT-2, Conv1D, dropout",
        build=from_config(
            "GPT2LMHeadModel",
            vocab_size=23,
            n_positions=8,
            n_embd=12,
            n_layer=2,
            n_head=3,
            n_inner=17,
            bos_token_id=0,
            eos_token_id=0,
        ),
        loss=labelled,
        samples=tokens(23, 6, 117),
        chunk=2,
        cut="transformer.h.1",
    ),
    Model(
        name="hf_llama",
        features="transformers: Llama; heads = head size = batch",
        build=from_config(
            "LlamaForCausalLM",
            vocab_size=16,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=8,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
        ),
        loss=labelled,
        samples=tokens(16, 4, 118),
        chunk=4,
        cut="model.layers.1",
    ),
    Model(
        name="t5",
        interacts=True,
        features="transformers: T5, relative biases shared by layers, tied",
        build=from_config(
            "T5ForConditionalGeneration",
            vocab_size=17,
            d_model=9,
            d_kv=3,
            d_ff=13,
            num_layers=2,
            num_heads=3,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=1,
        ),
        loss=labelled,
        samples=translations,
        stages=2,
    ),
    Model(
        name="bert",
        interacts=True,
        features="transformers: BERT for classes, padding",
        build=from_config(
            "BertForSequenceClassification",
            vocab_size=19,
            hidden_size=12,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=15,
            max_position_embeddings=8,
            num_labels=3,
        ),
        loss=labelled,
        samples=sentences,
        stages=2,
    ),
    Model(
        name="hf_vit",
        interacts=True,
        features="transformers: ViT",
        build=from_config(
            "ViTForImageClassification",
            hidden_size=10,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=13,
            image_size=6,
            patch_size=3,
            num_channels=1,
            num_labels=2,
        ),
        loss=labelled,
        samples=pictures,
        stages=2,
    ),
]
