"""The families' data: six samples each, decided by a fixed seed, padded where a real data set would be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.families.family import NUM_SAMPLES
from tests.jobs import Samples

VOCABULARY = 37
LENGTH = 7
PADDING, FIRST, LAST = 0, 1, 2  # tokens with a meaning; the others are words
TOKENS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": PADDING,
    "bos_token_id": FIRST,
    "eos_token_id": LAST,
}
IGNORED = -100


def generator(seed: int) -> torch.Generator:
    """Draws that nobody else takes part in."""
    return torch.Generator().manual_seed(seed)


def words(seed: int, length: int = LENGTH, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    """Tokens [samples, length] behind whose end is padding, and the mask [samples, length] that is 1 before
    it; the first has full length."""
    source = generator(seed)
    tokens = torch.randint(LAST + 1, vocabulary, (NUM_SAMPLES, length), generator=source)
    ends = torch.randint(max(2, length // 2), length + 1, (NUM_SAMPLES, 1), generator=source)
    ends[0] = length
    mask = (torch.arange(length) < ends).long()
    return tokens * mask, mask


def labelled(tokens: Tensor, mask: Tensor) -> Tensor:
    """The tokens as labels: padding is ignored."""
    return tokens.masked_fill(mask == 0, IGNORED)


def next_words(length: int = LENGTH) -> Samples:
    """For a decoder, which shifts the labels itself."""
    tokens, mask = words(1, length)
    return Samples(input_ids=tokens, attention_mask=mask, labels=labelled(tokens, mask))


def hidden_words(length: int = LENGTH) -> Samples:
    """For an encoder: every third word is replaced by token 1 and is what has to be found; all others are
    ignored."""
    tokens, mask = words(2, length)
    hidden = (torch.arange(length) % 3 == 1).expand_as(tokens) & (mask == 1)
    return Samples(
        input_ids=tokens.masked_fill(hidden, FIRST),
        attention_mask=mask,
        labels=tokens.masked_fill(~hidden, IGNORED),
    )


def texts_in_classes(length: int = LENGTH, classes: int = 3) -> Samples:
    """Whole texts with a class each."""
    tokens, mask = words(3, length)
    return Samples(input_ids=tokens, attention_mask=mask, labels=some_classes(classes))


def translations(length: int = LENGTH) -> Samples:
    """Two texts of different length; the second one is the labels."""
    tokens, mask = words(4, length)
    return Samples(input_ids=tokens, attention_mask=mask, labels=labelled(*words(5, length - 2)))


def some_classes(classes: int) -> Tensor:
    """A class per sample."""
    return torch.randint(classes, (NUM_SAMPLES,), generator=generator(6))


def pictures(height: int, width: int, channels: int = 3) -> Tensor:
    """Normal, [samples, channels, height, width]."""
    return torch.randn(NUM_SAMPLES, channels, height, width, generator=generator(7))


def pictures_in_classes(height: int, width: int, classes: int = 5, channels: int = 3) -> Samples:
    """Pictures with a class each."""
    return Samples(pixel_values=pictures(height, width, channels), labels=some_classes(classes))


def pictures_in_parts(height: int, width: int, classes: int = 5) -> Samples:
    """Pictures with a class per pixel; 255 is ignored."""
    labels = torch.randint(classes, (NUM_SAMPLES, height, width), generator=generator(8))
    labels[:, :2, :3] = 255
    return Samples(pixel_values=pictures(height, width), labels=labels)


def sound(length: int) -> Tensor:
    """Normal, [samples, length]."""
    return torch.randn(NUM_SAMPLES, length, generator=generator(9))


def spectra(frames: int, bands: int) -> Tensor:
    """Normal, [samples, frames, bands]."""
    return torch.randn(NUM_SAMPLES, frames, bands, generator=generator(10))
