"""A denoiser of digits: noise and times are drawn in the loop, which counts its steps under a progress bar."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

T = 50
device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(17)
betas = torch.linspace(1e-4, 0.05, T)
alphas_cumprod = torch.cumprod(1 - betas, dim=0)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(T, 16)
        self.inp = nn.Conv2d(1, 16, 3, padding=1)
        self.mid = nn.Conv2d(16, 16, 3, padding=1)
        self.out = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + self.time(t)[:, :, None, None])
        return self.out(h + F.silu(self.mid(h)))


def q_sample(x, t, noise):
    a = alphas_cumprod[t].view(-1, 1, 1, 1)
    return a.sqrt() * x + (1 - a).sqrt() * noise


def train():
    images = torch.tensor(load_digits().images[:1024], dtype=torch.float32).unsqueeze(1) / 8 - 1
    loader = DataLoader(TensorDataset(images), batch_size=16, shuffle=True)
    model = Denoiser().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(2):
        progress = tqdm(loader, disable=True)
        for (x,) in tqdm(loader, desc=f"epoch {epoch}", disable=True):
            x = x.to(device)
            t = torch.randint(0, T, (x.shape[0],))
            noise = torch.randn_like(x)
            pred = model(q_sample(x, t, noise), t)
            loss = F.mse_loss(pred, noise)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        progress.set_postfix(loss=loss.item())


if __name__ == "__main__":
    train()
