"""A GPT-2 of transformers, as `save_pretrained` has written it, is fine-tuned, and the result is one again.

    python examples/11_fine_tuning.py                                                    # trains on two simulated devices, then compares with transformers
    meshloom train  examples/11_fine_tuning.py --plan dp=2,tp=2 --out runs/fine_tuned    # any plan; each rank reads what it holds
    meshloom verify examples/11_fine_tuning.py --plan pp=2
    meshloom train  examples/11_fine_tuning.py -- PATH                                   # your own directory of a GPT-2

Without a PATH it is a small model over bytes with random weights, which is saved first: nothing is downloaded.
The data are the source files of Python's standard library.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import meshloom as ml

LENGTH = 64  # bytes per sample
PRETRAINED = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/gpt2_bytes")
RUN = Path("runs/fine_tuned")


def save_small_model(directory: Path) -> None:
    """What stands for a pretrained model. Ranks may do this at the same time: the first one's counts."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary, suppress(OSError):
        torch.manual_seed(5)
        GPT2LMHeadModel(config).save_pretrained(Path(temporary) / "model")
        (Path(temporary) / "model").rename(directory)


class Bytes(Dataset[Tensor]):
    """Some source files, one after another, cut into samples of int64 [LENGTH]."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:20]
        self.text = torch.frombuffer(
            bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
        )

    def __len__(self) -> int:
        return len(self.text) // LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * LENGTH : (index + 1) * LENGTH].long()


def loss(model: GPT2LMHeadModel, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


logging.disable_progress_bar()  # each rank would have its own
if not PRETRAINED.exists():
    save_small_model(PRETRAINED)

job = ml.Job(
    model=lambda: GPT2LMHeadModel(GPT2Config.from_pretrained(PRETRAINED)),
    weights=PRETRAINED,
    loss=loss,
    optimizer=lambda named: torch.optim.AdamW(named, lr=2e-3),
    data=Bytes,
    batch_size=16,
    steps=20,
)


def main() -> None:
    with ml.Trainer(job, "dp=2", devices="simulated", out=RUN, overwrite=True) as trainer:
        losses = [trainer.step(batch) for batch in trainer.batches()]
        checkpoint = trainer.save()
        trained = trainer.replicas[0].model.eval()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")

    config = GPT2Config.from_pretrained(PRETRAINED)
    again = GPT2LMHeadModel.from_pretrained(checkpoint, config=config)
    tokens = torch.stack([Bytes()[number] for number in range(4)])
    with torch.no_grad():
        difference = (again(tokens).logits - trained(tokens).logits).abs().max()
    print(f"from_pretrained({str(checkpoint)!r}): largest difference of its logits {difference:g}")


if __name__ == "__main__":
    main()
