"""zero=3 with tp and with pp on models of several towers: what one tower gives is read by many units of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.verified import equals_one_device

tf: Any = pytest.importorskip("transformers")

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]

WORDS = 131
SPECIAL: dict[str, Any] = {
    "vocab_size": WORDS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "decoder_start_token_id": 1,
    "dropout": 0.0,
}
BOTH: dict[str, Any] = {
    **SPECIAL,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 36,
    "decoder_ffn_dim": 36,
    "max_position_embeddings": 32,
}
TOWER: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT: dict[str, Any] = {**TOWER, "vocab_size": WORDS, "max_position_embeddings": 32}
BERT: dict[str, Any] = {**TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGES: dict[str, Any] = {**TOWER, "image_size": 16, "patch_size": 8}


def speech(make: str, **settings: Any) -> nn.Module:
    config = getattr(tf, f"{make}Config")(
        **{**BOTH, "max_source_positions": 32, "max_target_positions": 32, **settings}
    )
    return getattr(tf, f"{make}ForConditionalGeneration")(config)


def text(model: str, config: str) -> Callable[[], nn.Module]:
    return lambda: getattr(tf, model)(getattr(tf, config)(**BOTH, forced_eos_token_id=None))


def t5() -> nn.Module:
    return tf.T5ForConditionalGeneration(
        tf.T5Config(
            vocab_size=WORDS, d_model=24, d_kv=6, d_ff=36, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0
        )
    )  # fmt: skip


def clip() -> nn.Module:
    return tf.CLIPModel(
        tf.CLIPConfig(text_config={**TEXT, "eos_token_id": 1}, vision_config=IMAGES, projection_dim=12)
    )


def siglip() -> nn.Module:
    return tf.SiglipModel(tf.SiglipConfig(text_config=TEXT, vision_config=IMAGES))


def blip() -> nn.Module:
    reading = {**BERT, "encoder_hidden_size": 24, "bos_token_id": 1, "pad_token_id": 0, "eos_token_id": 2, "sep_token_id": 2}  # fmt: skip
    return tf.BlipForConditionalGeneration(
        tf.BlipConfig(text_config=reading, vision_config=IMAGES, projection_dim=12)
    )


def pictures_to_text() -> nn.Module:
    decoder = tf.BertConfig(**BERT, is_decoder=True, add_cross_attention=True)
    config = tf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        tf.ViTConfig(**IMAGES, hidden_dropout_prob=0.0), decoder
    )
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return tf.VisionEncoderDecoderModel(config=config)


def lxmert() -> nn.Module:
    sizes = {name: BERT[name] for name in BERT if name != "num_hidden_layers"}
    return tf.LxmertModel(
        tf.LxmertConfig(**sizes, l_layers=2, x_layers=2, r_layers=2, visual_feat_dim=12, visual_pos_dim=4)
    )


class Dual(nn.Module):
    """Two encoders of text, which meet in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (tf.BertModel(tf.BertConfig(**BERT)) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(input_ids=x).pooler_output, self.other(input_ids=y).pooler_output


def token_loss(inputs: str) -> Callable[[Any, Any], Tensor]:
    return lambda model, batch: model(**{inputs: batch[inputs]}, labels=batch["labels"]).loss


def pair_loss(model: Any, batch: Any) -> Tensor:
    out = model(input_ids=batch["input_ids"], pixel_values=batch["pixel_values"])
    return (1 - F.cosine_similarity(out.text_embeds, out.image_embeds)).mean()


def caption_loss(model: Any, batch: Any) -> Tensor:
    ids = batch["input_ids"]
    return model(pixel_values=batch["pixel_values"], input_ids=ids, labels=ids).loss


def looked_up_loss(model: Any, batch: Any) -> Tensor:
    out = model(input_ids=batch["input_ids"], visual_feats=batch["boxes"], visual_pos=batch["places"])
    return (
        out.pooled_output.square().mean()
        + out.vision_output.square().mean()
        + out.language_output.std(-1).mean()
    )


def dual_loss(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(*model(batch["input_ids"], batch["labels"]))


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Tensor]]] = {
    "whisper": (lambda: speech("Whisper", num_mel_bins=8), token_loss("input_features")),
    "speech2text": (
        lambda: speech("Speech2Text", input_feat_per_channel=8, conv_channels=16),
        lambda model, batch: model(input_features=batch["input_features"].transpose(1, 2), labels=batch["labels"]).loss,
    ),
    "t5": (t5, token_loss("input_ids")),
    "bart": (text("BartForConditionalGeneration", "BartConfig"), token_loss("input_ids")),
    "marian": (text("MarianMTModel", "MarianConfig"), token_loss("input_ids")),
    "pegasus": (text("PegasusForConditionalGeneration", "PegasusConfig"), token_loss("input_ids")),
    "clip": (clip, pair_loss),
    "siglip": (siglip, pair_loss),
    "blip": (blip, caption_loss),
    "vision_encoder_decoder": (pictures_to_text, token_loss("pixel_values")),
    "lxmert": (lxmert, looked_up_loss),
    "dual": (Dual, dual_loss),
}  # fmt: skip


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """What any of the families reads."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        source = torch.Generator().manual_seed(index)
        return {
            "input_ids": torch.randint(3, WORDS, (9,), generator=source),
            "labels": torch.randint(3, WORDS, (7,), generator=source),
            "input_features": torch.randn(8, 64, generator=source),
            "pixel_values": torch.randn(3, 16, 16, generator=source),
            "boxes": torch.randn(5, 12, generator=source),
            "places": torch.rand(5, 4, generator=source),
        }


@pytest.mark.covering("whisper-dp=2,tp=2")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("plan", ["dp=2,tp=2,zero=3", "dp=2,pp=2,microbatches=2,zero=3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_units_that_read_the_same_are_gathered_and_kept(family: str, plan: str) -> None:
    model, loss = FAMILIES[family]
    job = Job(
        model=model, loss=loss, optimizer=lambda named: torch.optim.AdamW([each for _, each in named], lr=1e-3), data=Samples, batch_size=4, steps=2,
    )  # fmt: skip
    equals_one_device(job, plan)
