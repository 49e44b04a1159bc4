"""Words are read from frames of sound-like features, of which nobody says where a letter begins: sequences with lengths and a CTC loss
(Graves et al., 2006).

    meshloom train  examples/16_speech.py --plan dp=2
    meshloom verify examples/16_speech.py --plan dp=2,pp=2,tp=2

The words are those of Python's own library. Each of their letters sounds for 2 to 4 frames, with the energies of a few bands, some noise, and
some of its neighbours' energies, as in speech. No file of sound is needed.
"""

from __future__ import annotations

import re
import string
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import Dataset

import meshloom as ml

BANDS, HIDDEN = 24, 96
LETTERS = string.ascii_lowercase


class Words(Dataset[tuple[Tensor, Tensor]]):
    """Frames [length, BANDS] of a word, and its letters, 1 for an a."""

    def __init__(self, held_out: bool = False) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
        text = " ".join(each.read_text(encoding="utf-8", errors="ignore") for each in files)
        words = sorted({each.lower() for each in re.findall(r"[A-Za-z]{3,10}", text)})
        self.words = [each for number, each in enumerate(words) if (number % 10 == 0) == held_out]
        self.sounds = torch.rand(len(LETTERS), BANDS, generator=torch.Generator().manual_seed(1)) ** 3

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        letters = torch.tensor([LETTERS.index(each) for each in self.words[index]])
        frames = self.sounds[letters.repeat_interleave(torch.randint(2, 5, letters.shape))]
        blurred = F.avg_pool1d(frames.T[None], 3, stride=1, padding=1)[0].T
        return 0.5 * (frames + blurred) + 0.15 * torch.randn_like(frames), letters + 1


def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Padded frames and letters, and their lengths."""
    frames, letters = zip(*samples, strict=True)
    return {
        "frames": pad_sequence(list(frames), batch_first=True),
        "lengths": torch.tensor([len(each) for each in frames]),
        "letters": pad_sequence(list(letters), batch_first=True),
        "num_letters": torch.tensor([len(each) for each in letters]),
    }


@ml.leaf
def read(layers: nn.Module, frames: Tensor, lengths: Tensor) -> Tensor:
    """What recurrent layers make of frames as far as their lengths: packing needs these as numbers, so it is one operator under tp and pp."""
    packed = pack_padded_sequence(frames, lengths.cpu(), batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(layers(packed)[0], batch_first=True, total_length=frames.shape[1])[0]


class Reader(nn.Module):
    """Frames [batch, length, BANDS] and their lengths -> logarithms of probabilities [batch, length, letters + 1], 0 for no letter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(BANDS, HIDDEN, num_layers=1, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * HIDDEN, len(LETTERS) + 1)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        return self.head(read(self.layers, frames, lengths)).log_softmax(2)


def loss(model: Reader, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The mean over letters."""
    read = model(batch["frames"], batch["lengths"]).transpose(0, 1)
    total = F.ctc_loss(read, batch["letters"], batch["lengths"], batch["num_letters"], reduction="sum")
    return total, batch["num_letters"].sum()


@ml.leaf
def is_right(best: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Whether every letter of a word is right: [batch], of the likeliest letter of each frame [batch, length]."""
    right: list[bool] = []
    for row, length, letters, count in zip(best, batch["lengths"], batch["letters"], batch["num_letters"], strict=True):  # fmt: skip
        merged = row[:length].unique_consecutive()
        right.append(torch.equal(merged[merged > 0], letters[:count]))
    return torch.tensor(right)


def words_right(model: Reader, batch: dict[str, Tensor]) -> Tensor:
    """The share of words that are right."""
    return is_right(model(batch["frames"], batch["lengths"]).argmax(2), batch).float().mean()


job = ml.Job(
    model=Reader,
    loss=loss,
    optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3),
    clip_grad_norm=5.0,
    data=Words,
    collate=collate,
    batch_size=32,
    steps=300,
    evaluate=ml.Evaluate(lambda: Words(held_out=True), {"words right": words_right}, every=100),
)
