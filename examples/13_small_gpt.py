"""A small GPT-2 of transformers learns to write from the source files of Python's standard library, byte after byte.

    python examples/13_small_gpt.py                                            # trains on this machine's cores, then prints samples
    meshloom train  examples/13_small_gpt.py --plan dp=2 --out runs/small_gpt  # the same, under any plan
    meshloom verify examples/13_small_gpt.py --plan tp=2 --steps 3
    python examples/13_small_gpt.py runs/small_gpt                             # samples of a run that was trained before

What it has learned is in runs/small_gpt, a directory that `from_pretrained` reads.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import meshloom as ml
from meshloom.checkpoint.checkpoint import find

LENGTH = 96  # bytes per sample
STEPS = 1000
RUN = Path("runs/small_gpt")


class Bytes(Dataset[Tensor]):
    """The library's files, one after another, cut into samples of int64 [LENGTH + 1]; one in 1,000 is held out."""

    def __init__(self, held_out: bool = False) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = torch.frombuffer(bytearray(b"".join(each.read_bytes() for each in files)), dtype=torch.uint8)
        samples = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
        here = (torch.arange(len(samples)) % 1000 == 0) == held_out
        self.samples = samples[here]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        return self.samples[index].long()


def small_gpt() -> GPT2LMHeadModel:
    """0.4 million parameters."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=LENGTH, n_embd=96, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def loss(model: GPT2LMHeadModel, tokens: Tensor) -> Tensor:
    """The mean over the batch's bytes, in nats."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def scheduler(optimizer: torch.optim.Optimizer) -> LambdaLR | OneCycleLR:
    return OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS + 1, pct_start=0.1)


job = ml.Job(
    model=small_gpt,
    loss=loss,
    optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3, weight_decay=0.1),
    scheduler=scheduler,
    clip_grad_norm=1.0,
    data=Bytes,
    batch_size=24,
    steps=STEPS,
    evaluate=ml.Evaluate(lambda: Bytes(held_out=True), {"nats per byte": loss}, every=500),
    tokens_per_sample=LENGTH,
)


@torch.no_grad()
def continued(model: GPT2LMHeadModel, start: str, num_bytes: int = 200) -> str:
    """`start` and what the model writes after it, drawn at temperature 0.7."""
    tokens = torch.tensor([[*start.encode()]])
    for _ in range(num_bytes):
        logits = model(input_ids=tokens[:, -LENGTH:], use_cache=False).logits[0, -1]
        tokens = torch.cat([tokens, torch.multinomial((logits / 0.7).softmax(0), 1)[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def main() -> None:
    if len(sys.argv) < 2:
        with ml.Trainer(job, "dp=2", devices="simulated", out=RUN, overwrite=True) as trainer:
            trainer.fit()
    model = GPT2LMHeadModel.from_pretrained(find(Path(sys.argv[1]) if len(sys.argv) > 1 else RUN)).eval()
    torch.manual_seed(0)
    for start in ("def ", "class ", "    # "):
        print("-" * 40, continued(model, start), sep="\n")


if __name__ == "__main__":
    main()
