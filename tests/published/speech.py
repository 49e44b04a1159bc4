"""Speech: waves with letters, spectra with words."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.published.model import from_transformers, published


def _wave(samples: int) -> dict[str, Tensor]:
    """Four seconds at 16 kHz, and 48 letters."""
    return {
        "input_values": torch.zeros(samples, 1).expand(samples, 64_000),
        "labels": torch.ones(samples, 48, dtype=torch.long),
    }


def _aligned(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """CTC over all frames, each label of full length. The model's own loss asks first whether a label is too
    large, which depends on values."""
    scores = model(batch["input_values"]).logits.log_softmax(2).transpose(0, 1)
    frames, samples = scores.shape[:2]
    return F.ctc_loss(scores, batch["labels"], [frames] * samples, [batch["labels"].shape[1]] * samples)


def _wav2vec2() -> nn.Module:
    import transformers  # here, because listing the set need not wait for it

    # Which layers are skipped, and what is hidden, are drawn with NumPy and decided in Python.
    return transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(layerdrop=0.0, apply_spec_augment=False))


def _spectrum(samples: int) -> dict[str, Tensor]:
    """Thirty seconds as 3,000 frames of 80 bands, and 448 words."""
    return {
        "input_features": torch.zeros(samples, 1, 1).expand(samples, 80, 3000),
        "labels": torch.ones(samples, 448, dtype=torch.long),
    }


SPEECH = [
    published(
        "wav2vec2-base", "speech", "4 s of sound", _wav2vec2, _wave, chunk=4, loss=_aligned, dense=True
    ),
    # 1.5 % of its parameters, the encoder's positions, are not trained, so that nothing is saved by dividing
    # them.
    from_transformers(
        "whisper-tiny",
        "speech",
        "3,000 frames",
        "WhisperForConditionalGeneration",
        _spectrum,
        {},
        chunk=4,
    ),
]
