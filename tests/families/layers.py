"""torch.nn: each of its kinds of layers in a model that is mostly made of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job_functions import Loss
from tests.families.family import NUM_SAMPLES, Family, family_of
from tests.families.samples import (
    IGNORED,
    VOCABULARY,
    generator,
    pictures,
    some_classes,
    sound,
    spectra,
    words,
)
from tests.jobs import Samples

CLASSES = 5


def _layers(
    name: str,
    notes: str,
    build: Callable[[float], nn.Module],
    samples: Callable[[], Samples],
    loss: Callable[..., Loss] | None = None,
) -> Family:
    return family_of(name, "torch.nn", notes, build, loss or _class_loss, samples)


def _class_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"])


def _word_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A sum over the words that are not padding, and how many they are."""
    logits = model(batch["x"], batch["padding"])
    return F.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
    ), (~batch["padding"]).sum()


def _texts() -> Samples:
    """x tokens [7], padding (true behind the end), labels: a class of each word."""
    tokens, mask = words(51)
    return Samples(x=tokens, padding=mask == 0, labels=(tokens % CLASSES).masked_fill(mask == 0, IGNORED))


def _pairs_of_texts() -> Samples:
    """x tokens [7], y tokens [5], labels the classes of y's words."""
    (x, mask), (y, _) = words(52), words(53, 5)
    return Samples(x=x, padding=mask == 0, y=y, labels=y % CLASSES)


def _pair_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(
        model(batch["x"], batch["padding"], batch["y"]).flatten(0, 1), batch["labels"].flatten()
    )


class _Encoder(nn.Module):
    """Tokens and padding [batch, length] -> [batch, length, classes]."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 15)
        layer = nn.TransformerEncoderLayer(15, 3, 29, dropout, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(15), enable_nested_tensor=False)
        self.head = nn.Linear(15, CLASSES)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x), src_key_padding_mask=padding))


class _Translator(nn.Module):
    """Tokens [batch, length], padding, tokens [batch, other length] -> [batch, other length, classes]."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 20)
        self.layers = nn.Transformer(20, 4, 2, 2, 29, dropout, activation=F.gelu, batch_first=True)
        self.head = nn.Linear(20, CLASSES)

    def forward(self, x: Tensor, padding: Tensor, y: Tensor) -> Tensor:
        later = torch.ones(y.shape[1], y.shape[1], dtype=torch.bool, device=y.device).triu(1)
        return self.head(
            self.layers(
                self.embed(x),
                self.embed(y),
                tgt_mask=later,
                tgt_is_causal=True,
                src_key_padding_mask=padding,
                memory_key_padding_mask=padding,
            )
        )


class _Attention(nn.Module):
    """Tokens and padding -> classes of words; keys and values of another width, an added key, weights handed
    out and used."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 15)
        self.context = nn.Linear(15, 11)
        self.cross = nn.MultiheadAttention(
            15, 3, dropout, kdim=11, vdim=11, add_bias_kv=True, batch_first=True
        )
        self.own = nn.MultiheadAttention(15, 5, dropout, add_zero_attn=True, batch_first=True)
        self.head = nn.Linear(15, CLASSES)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.embed(x)
        context = torch.tanh(self.context(x))
        x = x + self.cross(x, context, context, key_padding_mask=padding, need_weights=False)[0]
        mixed, weights = self.own(x, x, x, key_padding_mask=padding)
        return self.head(x + mixed + weights.amax(2, keepdim=True))


class _Recurrent(nn.Module):
    """Sequences [batch, length, 5] -> classes, through two recurrent layers."""

    def __init__(self, layers: nn.Module, width: int) -> None:
        super().__init__()
        self.layers = layers
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0][:, -1])


class _Cell(nn.Module):
    """Sequences [batch, length, 5] -> classes; a cell called in a Python loop, from a learned state."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(9))
        self.first, self.second = nn.LSTMCell(5, 9), nn.RNNCell(9, 7, nonlinearity="relu")
        self.head = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.start.expand(len(x), -1), self.start.tanh().expand(len(x), -1)
        state = x.new_zeros(len(x), 7)
        for step in x.unbind(1):
            hidden = self.first(step, hidden)
            state = self.second(hidden[0], state)
        return self.head(state)


class _Bags(nn.Module):
    """Bags of words [batch, length] -> classes: sums, means and maxima of embeddings, padding left out."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = nn.EmbeddingBag(VOCABULARY, 7, mode="sum", padding_idx=0)
        self.means = nn.EmbeddingBag(VOCABULARY, 5, mode="mean", padding_idx=0)
        self.maxima = nn.EmbeddingBag(VOCABULARY, 3, mode="max")
        self.hidden = nn.Linear(15, 11)
        self.head = nn.Linear(11, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(torch.cat([self.sums(x), self.means(x), self.maxima(x)], 1))))


class _Products(nn.Module):
    """Vectors [batch, 11] -> classes: halves multiplied with each other, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Bilinear(5, 6, 9)
        self.second = nn.Bilinear(9, 11, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x[:, :5], x[:, 5:])), x)


def _recurrent(name: str, notes: str, layers: Callable[[float], nn.Module], width: int) -> Family:
    return _layers(
        name,
        notes,
        lambda rate: _Recurrent(layers(rate), width),
        lambda: Samples(x=spectra(9, 5), labels=some_classes(CLASSES)),
    )


def _stack(
    name: str, notes: str, build: Callable[[float], list[nn.Module]], x: Callable[[], Tensor]
) -> Family:
    return _layers(
        name,
        notes,
        lambda rate: nn.Sequential(*build(rate)),
        lambda: Samples(x=x(), labels=some_classes(CLASSES)),
    )


LAYERS = [
    _layers("transformer_encoder", "norms before the layers; padding masks; (sum, weight)", _Encoder, _texts, _word_loss),
    _layers("transformer", "encoder and decoder; causal and padding masks", _Translator, _pairs_of_texts, _pair_loss),
    _layers("multihead_attention", "other widths of keys and values; added keys; weights used", _Attention, _texts, _word_loss),
    _recurrent("lstm", "two layers in both directions", lambda rate: nn.LSTM(5, 9, 2, dropout=rate, bidirectional=True, batch_first=True), 18),
    _recurrent("gru", "two layers", lambda rate: nn.GRU(5, 9, 2, dropout=rate, batch_first=True), 9),
    _layers("cells", "LSTMCell and RNNCell in a Python loop", lambda rate: _Cell(), lambda: Samples(x=spectra(9, 5), labels=some_classes(CLASSES))),
    _stack("conv1d", "strides, dilation, circular padding, weight norm", lambda rate: [
        nn.Unflatten(1, (1, 41)), nn.Conv1d(1, 6, 5, stride=2, padding=2, padding_mode="circular"), nn.GELU(),
        nn.utils.parametrizations.weight_norm(nn.Conv1d(6, 9, 3, dilation=2, groups=3)), nn.Dropout1d(rate), nn.PReLU(9),
        nn.AdaptiveAvgPool1d(3), nn.Flatten(), nn.Linear(27, CLASSES),
    ], lambda: sound(41)),
    _stack("conv2d", "depthwise, transposed, pooled; batch norm", lambda rate: [
        nn.Conv2d(3, 7, 3, padding=1, bias=False), nn.BatchNorm2d(7), nn.ReLU(inplace=True), nn.MaxPool2d(2, ceil_mode=True),
        nn.Conv2d(7, 7, 3, groups=7), nn.SELU(), nn.ConvTranspose2d(7, 5, 3, stride=2, output_padding=1), nn.BatchNorm2d(5),
        nn.Hardswish(), nn.Dropout2d(rate), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(20, CLASSES),
    ], lambda: pictures(13, 11)),
    _stack("batch_norm", "running statistics as plain means over all batches; statistics of the batch alone", lambda rate: [
        nn.Conv1d(7, 9, 3), nn.BatchNorm1d(9, momentum=None), nn.Tanh(), nn.Conv1d(9, 5, 2), nn.BatchNorm1d(5, track_running_stats=False),
        nn.Dropout(rate), nn.Flatten(), nn.Linear(50, CLASSES),
    ], lambda: spectra(7, 13)),
    _stack("conv3d", "volumes, replicated borders, instance norm", lambda rate: [
        nn.Unflatten(1, (1, 3)), nn.Conv3d(1, 5, 3, padding=1, padding_mode="replicate"), nn.InstanceNorm3d(5, affine=True), nn.SiLU(),
        nn.Conv3d(5, 7, (2, 3, 3), stride=(1, 2, 2)), nn.Softplus(), nn.AvgPool3d((2, 1, 2)), nn.Dropout3d(rate), nn.Flatten(),
        nn.Linear(28, CLASSES),
    ], lambda: pictures(9, 8)),
    _stack("group_norm", "group, layer and RMS norms of pictures; shuffled pixels", lambda rate: [
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ELU(), nn.PixelUnshuffle(2), nn.Conv2d(32, 9, 1), nn.GroupNorm(3, 9, affine=False),
        nn.Mish(), nn.LayerNorm([9, 5, 6]), nn.Upsample(scale_factor=2, mode="bilinear"), nn.RMSNorm([10, 12]), nn.AlphaDropout(rate),
        nn.AvgPool2d(5), nn.Flatten(), nn.Linear(36, CLASSES),
    ], lambda: pictures(10, 12)),
    _layers("embedding_bag", "bags of words; three ways of pooling", lambda rate: _Bags(),
            lambda: Samples(x=words(54)[0], labels=some_classes(CLASSES))),
    _layers("bilinear", "products of two inputs", lambda rate: _Products(),
            lambda: Samples(x=torch.randn(NUM_SAMPLES, 11, generator=generator(55)), labels=some_classes(CLASSES))),
]  # fmt: skip
