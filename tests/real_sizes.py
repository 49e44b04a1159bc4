"""Jobs of published models at the sizes that people train: weights drawn from their configurations, data from
this machine.

    meshloom verify tests/real_sizes.py:gpt2 --plan tp=2 --devices cpu --dtype float32

Text is that of Python's own library, a number for each of its most frequent words; pictures are
scikit-learn's handwritten digits, enlarged; sound is a voice of gliding harmonics. `..._short` are two layers
of the same width, at full length.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshloom as ml
from meshloom.core.job_functions import Loss
from tests.jobs import Samples, own_loss

NUM_SAMPLES = 4
BATCH = 2
IGNORED = -100
LIBRARY = (
    "argparse",
    "typing",
    "inspect",
    "tarfile",
    "turtle",
    "statistics",
    "doctest",
    "pathlib",
    "optparse",
    "subprocess",
)


def job_of(
    model: Callable[[], nn.Module],
    data: Callable[[], Samples],
    loss: Callable[[Any, Any], Loss] | None = None,
) -> ml.Job:
    """Three steps of two samples each, with AdamW."""
    return ml.Job(
        model=model, loss=loss or own_loss, optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4, weight_decay=0.01),
        data=data, batch_size=BATCH, steps=3, clip_grad_norm=1.0,
    )  # fmt: skip


def built(name: str, **settings: Any) -> nn.Module:
    """A model of `transformers` with the default configuration of its class but for `settings`."""
    import transformers

    kind: Any = getattr(transformers, name)
    return kind(kind.config_class(**settings))


def loss_of_labels(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The same as a sum over the labels that count, which are not as many in each sample."""
    count = (batch["labels"] != IGNORED).sum()
    return model(**batch).loss * count, count


def text(length: int, vocabulary: int) -> Tensor:
    """Words of Python's library, [samples, length]: the most frequent word is 3, and so on; what is left over
    is 2."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = re.findall(r"\w+|[^\w\s]", "".join((library / f"{name}.py").read_text() for name in LIBRARY))[
        : NUM_SAMPLES * length
    ]
    numbers = {
        word: number for number, (word, _) in enumerate(Counter(found).most_common(vocabulary - 3), start=3)
    }
    return torch.tensor([numbers.get(word, 2) for word in found]).view(NUM_SAMPLES, length)


def next_words(length: int, vocabulary: int) -> Samples:
    """For a decoder, which shifts the labels itself."""
    words = text(length, vocabulary)
    return Samples(input_ids=words, labels=words)


def hidden_words(length: int, vocabulary: int) -> Samples:
    """For an encoder: about 15% of the words are hidden and have to be found, all others are ignored."""
    words = text(length, vocabulary)
    hidden = torch.rand(words.shape, generator=torch.Generator().manual_seed(1)) < 0.15
    return Samples(
        input_ids=words.masked_fill(hidden, 1),
        attention_mask=torch.ones_like(words),
        labels=words.masked_fill(~hidden, IGNORED),
    )


def translations(length: int, vocabulary: int) -> Samples:
    """A text, and a quarter of it to be written."""
    words = text(length, vocabulary)
    return Samples(input_ids=words, labels=words[:, : length // 4].clone())


def digits(size: int) -> tuple[Tensor, Tensor]:
    """Handwritten digits from 8 x 8 to [samples, 3, size, size], about normal, and which they are."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    small = torch.tensor(data.images[:NUM_SAMPLES], dtype=torch.float32)[:, None] / 16
    large = F.interpolate(small, size=(size, size), mode="bicubic")
    colours = torch.tensor([0.9, 1.0, 1.1]).view(1, 3, 1, 1)
    return (large * colours - 0.45) / 0.25, torch.tensor(data.target[:NUM_SAMPLES])


def pictures_in_classes(size: int) -> Samples:
    """Pictures with a class each."""
    pictures, classes = digits(size)
    return Samples(pixel_values=pictures, labels=classes)


def pictures_in_parts(size: int) -> Samples:
    """Pictures with a class per pixel: the digit's, or paper; the border counts for nothing."""
    pictures, classes = digits(size)
    parts = torch.where(pictures[:, 0] > 0, classes[:, None, None] + 1, 0)
    parts[:, :4] = 255
    return Samples(pixel_values=pictures, labels=parts)


def voice(seconds: float) -> Tensor:
    """Harmonics that glide and fade, and some noise, at 16 kHz: [samples, time], of mean 0 and variance 1."""
    time = torch.arange(int(seconds * 16_000)) / 16_000
    source = torch.Generator().manual_seed(2)
    waves: list[Tensor] = []
    for number in range(NUM_SAMPLES):
        phase = 2 * torch.pi * torch.cumsum(120 + 40 * number + 30 * torch.sin(2 * time + number), 0) / 16_000
        wave = sum((torch.sin(k * phase) / k for k in range(1, 8)), torch.zeros_like(time)) * (
            0.6 + 0.4 * torch.sin(9 * time)
        )
        waves.append(wave + 0.05 * torch.randn(time.shape, generator=source))
    together = torch.stack(waves)
    return (together - together.mean(1, keepdim=True)) / together.std(1, keepdim=True)


def spoken_letters(seconds: float) -> Samples:
    """A voice and 24 letters of 31, to be aligned by the loss."""
    letters = torch.randint(1, 32, (NUM_SAMPLES, 24), generator=torch.Generator().manual_seed(3))
    return Samples(input_values=voice(seconds), labels=letters, lengths=torch.full((NUM_SAMPLES,), 24))


def aligned(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Connectionist temporal classification. The model's own looks at the labels' values, which a divided
    program cannot."""
    scores = model(batch["input_values"]).logits.log_softmax(-1).transpose(0, 1)  # [frames, samples, letters]
    frames = torch.full_like(batch["lengths"], scores.shape[0])
    return F.ctc_loss(scores, batch["labels"], frames, batch["lengths"], zero_infinity=True)


def dictated(frames: int, words: int) -> Samples:
    """The log-mel spectra [80, frames] of a voice, and the words in it."""
    from transformers import WhisperFeatureExtractor

    extract: Any = WhisperFeatureExtractor()
    heard = extract(list(voice(frames / 100).numpy()), sampling_rate=16_000, return_tensors="pt")[
        "input_features"
    ]
    assert tuple(heard.shape) == (NUM_SAMPLES, 80, frames)
    return Samples(input_features=heard, labels=text(words, 51_865))


def gpt2(layers: int = 12) -> ml.Job:
    """GPT-2 of 124 million parameters, at 1,024 tokens."""
    return job_of(partial(built, "GPT2LMHeadModel", n_layer=layers), partial(next_words, 1024, 50_257))


def gpt2_short() -> ml.Job:
    """Two layers of it."""
    return gpt2(2)


def bert(layers: int = 12) -> ml.Job:
    """BERT-base, at 512 tokens."""
    return job_of(
        partial(built, "BertForMaskedLM", num_hidden_layers=layers),
        partial(hidden_words, 512, 30_522),
        loss_of_labels,
    )


def bert_short() -> ml.Job:
    """Two layers of it."""
    return bert(2)


def vit() -> ml.Job:
    """ViT-B/16, at 224 x 224."""
    return job_of(
        partial(built, "ViTForImageClassification", num_labels=1000), partial(pictures_in_classes, 224)
    )


def resnet() -> ml.Job:
    """ResNet-50, at 224 x 224."""
    return job_of(
        partial(built, "ResNetForImageClassification", num_labels=1000), partial(pictures_in_classes, 224)
    )


def t5() -> ml.Job:
    """T5-small, at 512 tokens."""
    return job_of(
        partial(built, "T5ForConditionalGeneration", decoder_start_token_id=0),
        partial(translations, 512, 32_128),
    )


def whisper() -> ml.Job:
    """Whisper-tiny, at 3,000 frames."""
    return job_of(partial(built, "WhisperForConditionalGeneration"), partial(dictated, 3000, 64))


def wav2vec2() -> ml.Job:
    """wav2vec2-base on four seconds of sound: no layers are left out, and no spans hidden, at random, as that
    is decided in Python."""
    settings = {"layerdrop": 0.0, "apply_spec_augment": False}
    return job_of(partial(built, "Wav2Vec2ForCTC", **settings), partial(spoken_letters, 4.0), aligned)


def segformer() -> ml.Job:
    """SegFormer-B0, at 512 x 512."""
    return job_of(
        partial(built, "SegformerForSemanticSegmentation", num_labels=150, semantic_loss_ignore_index=255),
        partial(pictures_in_parts, 512),
    )
