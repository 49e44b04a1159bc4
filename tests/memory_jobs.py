"""Ten unlike models at sizes where activations matter, to predict and to measure the memory of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.jobs import own_loss

BATCH = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its data: `batch(generator)` makes one chunk."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Any]
    batch: Callable[[torch.Generator], dict[str, Tensor]]

    def job(self, optimizer: str) -> Job:
        return Job(
            model=self.build,
            loss=self.loss,
            optimizer=OPTIMIZERS[optimizer],
            data=lambda: [0],
            batch_size=BATCH,
            steps=1,
        )

    def autocast(self) -> Case:
        """The same under bfloat16 autocast."""

        def loss(model: nn.Module, batch: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return self.loss(model, batch)

        return Case(build=self.build, loss=loss, batch=self.batch)


OPTIMIZERS: Mapping[str, Any] = {
    "adamw": lambda named: torch.optim.AdamW(named, lr=1e-3),
    "sgd": lambda named: torch.optim.SGD(named, lr=1e-2, momentum=0.9),
    "adafactor": lambda named: torch.optim.Adafactor(named),
}


def _transformers(model: str, batch: Callable[[torch.Generator], dict[str, Tensor]], **settings: Any) -> Case:
    def build() -> nn.Module:
        import transformers

        kind = getattr(transformers, model)
        return kind(kind.config_class(**settings))

    return Case(build=build, loss=own_loss, batch=batch)


def _words(length: int, vocabulary: int = 500) -> Callable[[torch.Generator], dict[str, Tensor]]:
    def batch(generator: torch.Generator) -> dict[str, Tensor]:
        tokens = torch.randint(5, vocabulary, (BATCH, length), generator=generator)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return batch


def _pictures(size: int, classes: int = 10) -> Callable[[torch.Generator], dict[str, Tensor]]:
    return lambda generator: {
        "pixel_values": torch.randn(BATCH, 3, size, size, generator=generator),
        "labels": torch.randint(classes, (BATCH,), generator=generator),
    }


class _UNet(nn.Module):
    """Down twice, up twice, with batch norm and dropout; [batch, 3, height, width] -> [batch, 4, height,
    width]."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(_convolutions(*each) for each in ((3, 12), (12, 24)))
        self.middle = _convolutions(24, 48)
        self.lift = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in (24, 12))
        self.up = nn.ModuleList(_convolutions(2 * width, width) for width in (24, 12))
        self.head = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for block in self.down:
            seen.append(x := block(x))
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for lift, block in zip(self.lift, self.up, strict=True):
            x = block(torch.cat([seen.pop(), lift(x)], 1))
        return self.head(x)


def _convolutions(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True), nn.Dropout(0.1)
    )


class _Recurrent(nn.Module):
    """Embedding, two LSTM layers, head; tokens [batch, length] -> [batch, length, 200]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, 64)
        self.lstm = nn.LSTM(64, 96, 2, batch_first=True)
        self.head = nn.Linear(96, 200)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0])


def _recurrent_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["x"].flatten())


SETTINGS = [("adamw", "float32"), ("sgd", "float32"), ("adamw", "bfloat16 autocast")]


def case_of(name: str, precision: str) -> Case:
    """A case in one of the precisions of `SETTINGS`."""
    return CASES[name].autocast() if precision == "bfloat16 autocast" else CASES[name]


_DECODER: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip

CASES: dict[str, Case] = {
    "gpt2": _transformers("GPT2LMHeadModel", _words(48), vocab_size=500, n_embd=48, n_layer=2, n_head=4, n_positions=48, use_cache=False),
    "llama": _transformers("LlamaForCausalLM", _words(48), **_DECODER),
    "bert": _transformers("BertForMaskedLM", _words(48), vocab_size=500, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
                          intermediate_size=128, max_position_embeddings=48),
    "t5": _transformers("T5ForConditionalGeneration", _words(32), vocab_size=500, d_model=48, d_kv=12, d_ff=128, num_layers=2, num_heads=4,
                        decoder_start_token_id=0, use_cache=False),
    "vit": _transformers("ViTForImageClassification", _pictures(48), hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
                         intermediate_size=128, image_size=48, patch_size=6, num_labels=10),
    "resnet": _transformers("ResNetForImageClassification", _pictures(48), embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2], num_labels=10),
    "mixtral": _transformers("MixtralForCausalLM", _words(48), **_DECODER, num_local_experts=4, num_experts_per_tok=2,
                             experts_implementation="batched_mm"),
    "mamba": _transformers("MambaForCausalLM", _words(24), vocab_size=500, hidden_size=48, state_size=8, num_hidden_layers=2, use_cache=False),
    "u_net": Case(build=_UNet, loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]), batch=lambda generator: {
        "x": torch.randn(BATCH, 3, 32, 32, generator=generator), "y": torch.randint(4, (BATCH, 32, 32), generator=generator)}),
    "lstm": Case(build=_Recurrent, loss=_recurrent_loss, batch=lambda generator: {"x": torch.randint(200, (BATCH, 50), generator=generator)}),
}  # fmt: skip
