"""A pretrained GPT-2 is fine-tuned with LoRA (Hu et al., 2021): its own weights stay as they are, and small factors beside them
learn a new kind of text.

    meshloom train  examples/14_lora.py --plan dp=2 --out runs/lora
    meshloom verify examples/14_lora.py --plan tp=2
    meshloom train  examples/14_lora.py -- PATH              # your own directory of a GPT-2 over bytes

PATH is what `save_pretrained` writes, by default what examples/13_small_gpt.py has learned; without that, random weights are
saved first. The new text is the help pages of Python, which are English, where the pretraining was source code.

The base does not train (`requires_grad_(False)`): it has no optimizer state, and no gradient of it is computed or sent.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import meshloom as ml
from meshloom.checkpoint.checkpoint import find
from meshloom.core.errors import CheckpointError

LENGTH, RANK = 96, 8


class WithLoRA(nn.Module):
    """A linear layer of the base, and beside it a product of two factors of rank RANK, which begins as zero."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(inputs, RANK, bias=False)
        self.up = nn.Linear(RANK, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def with_lora() -> GPT2LMHeadModel:
    """The base with factors beside the layers that make queries, keys and values, and beside both of each MLP."""
    model = GPT2LMHeadModel(GPT2Config.from_pretrained(PRETRAINED)).requires_grad_(False)
    for block in model.transformer.h:
        for module, name in ((block.attn, "c_attn"), (block.mlp, "c_fc"), (block.mlp, "c_proj")):
            base = getattr(module, name)
            setattr(module, name, WithLoRA(base, *base.weight.shape))
    return model


def name_in_files(name: str) -> str | None:
    """Of a tensor of the model in the base's files, which have no factors."""
    return None if ".down." in name or ".up." in name else name.replace(".base.", ".")


class Help(Dataset[Tensor]):
    """Python's help pages, one after another, cut into samples of int64 [LENGTH + 1]; one in 20 is held out."""

    def __init__(self, held_out: bool = False) -> None:
        text = "".join(topics[name] for name in sorted(topics)).encode()
        starts = range(0, len(text) - LENGTH, LENGTH + 1)
        self.samples = [
            text[start : start + LENGTH + 1]
            for number, start in enumerate(starts)
            if (number % 20 == 0) == held_out
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([*self.samples[index]])


def loss(model: GPT2LMHeadModel, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def pretrained() -> Path:
    """Where the base is; random weights are saved where there is none. Ranks may do this at the same time: the first counts."""
    if len(sys.argv) > 1:
        return Path(sys.argv[1])
    with suppress(CheckpointError, FileNotFoundError):
        return find(Path("runs/small_gpt"))
    directory = Path("runs/untrained_gpt")
    directory.parent.mkdir(parents=True, exist_ok=True)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary, suppress(OSError):
        torch.manual_seed(5)
        GPT2LMHeadModel(config).save_pretrained(Path(temporary) / "model")
        (Path(temporary) / "model").rename(directory)
    return directory


PRETRAINED = pretrained()
job = ml.Job(
    model=with_lora,
    weights=PRETRAINED,
    weight_names=name_in_files,
    loss=loss,
    optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3),
    data=Help,
    batch_size=16,
    steps=200,
    evaluate=ml.Evaluate(lambda: Help(held_out=True), {"nats per byte": loss}, every=100),
    tokens_per_sample=LENGTH,
)
