"""A character model trained by a loop that makes its own batches: gradients over several batches, the next batch fetched between forward and
backward, an estimate over both splits, a checkpoint of model and optimizer."""

import math
import os
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml

out_dir = sys.argv[1] if len(sys.argv) > 1 else "out"
block_size, batch_size, accumulation, steps = 16, 6, 3, 4
torch.manual_seed(1337)
text = open(os.__file__, "rb").read()[:20_000]  # noqa: SIM115
data = np.frombuffer(text, dtype=np.uint8) % 96


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (
            each.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for each in self.c_attn(self.ln_1(x)).split(c, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, width=32, heads=4, layers=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(96, width), nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, 96, bias=False)
        self.wte.weight = self.lm_head.weight
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(
                    p, std=0.02 / math.sqrt(2 * layers) if name.endswith("c_proj.weight") else 0.02
                )

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = (
            None
            if targets is None
            else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        )
        return logits, loss

    def configure_optimizers(self, weight_decay, lr):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def get_batch(split):
    part = data[: len(data) // 2] if split == "train" else data[len(data) // 2 :]
    ix = torch.randint(len(part) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(part[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(part[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return ml.share((x, y))


model = GPT()
optimizer = model.configure_optimizers(0.1, 1e-3)
model = ml.parallel(model)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(2)
        for k in range(2):
            _, loss = model(*get_batch(split))
            losses[k] = loss.item()
        out[split] = ml.mean(losses.mean())
    model.train()
    return out


X, Y = get_batch("train")
best = 1e9
for it in range(steps):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * (it + 1) / steps
    if it % 2 == 0:
        losses = estimate_loss()
        if losses["val"] < best:
            best = losses["val"]
            os.makedirs(out_dir, exist_ok=True)
            ml.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter": it},
                os.path.join(out_dir, "ckpt.pt"),
            )
    for _ in range(accumulation):
        logits, loss = model(X, Y)
        loss = loss / accumulation
        X, Y = get_batch("train")
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
if ml.main:
    print(f"best {float(best):.4f}")
