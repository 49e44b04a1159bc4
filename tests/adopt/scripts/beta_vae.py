"""A convolutional autoencoder with a weight of the divergence that grows with the steps."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset, random_split

BATCH = 48
EPOCHS = 2
LATENT = 6
WARMUP = 30


class VAE(nn.Module):
    def __init__(self, latent):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(128, 32),
            nn.ReLU(),
        )
        self.mu = nn.Linear(32, latent)
        self.logvar = nn.Linear(32, latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, 128),
            nn.ReLU(),
            nn.Unflatten(1, (8, 4, 4)),
            nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1),
            nn.Sigmoid(),
        )

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def forward(self, x):
        h = self.encoder(x)
        mu, logvar = self.mu(h), self.logvar(h)
        return self.decoder(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon_x, x, mu, logvar, beta):
    bce = F.binary_cross_entropy(recon_x, x, reduction="sum") / x.size(0)
    kld = -0.5 * torch.mean(torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1))
    return bce + beta * kld, bce, kld


def main():
    torch.manual_seed(42)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = torch.from_numpy(load_digits().images).float().unsqueeze(1).div(16.0)
    dataset = TensorDataset(images)
    train_set, valid_set = random_split(
        dataset, [1500, len(dataset) - 1500], generator=torch.Generator().manual_seed(1)
    )
    train_loader = DataLoader(train_set, batch_size=BATCH, shuffle=True)
    valid_loader = DataLoader(valid_set, batch_size=BATCH)
    model = VAE(LATENT).to(device)
    opt = optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    sched = optim.lr_scheduler.CosineAnnealingLR(opt, T_max=EPOCHS * len(train_loader))
    global_step = 0
    best = float("inf")
    for epoch in range(EPOCHS):
        model.train()
        running = {"loss": 0.0, "bce": 0.0, "kld": 0.0}
        for (x,) in train_loader:
            x = x.to(device)
            beta = min(1.0, global_step / WARMUP)
            recon, mu, logvar = model(x)
            loss, bce, kld = loss_function(recon, x, mu, logvar, beta)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            sched.step()
            global_step += 1
            running["loss"] += loss.item() * x.size(0)
            running["bce"] += bce.item() * x.size(0)
            running["kld"] += kld.item() * x.size(0)
        n = len(train_loader.dataset)
        print({k: round(v / n, 3) for k, v in running.items()})
        model.eval()
        valid = 0.0
        with torch.no_grad():
            for (x,) in valid_loader:
                x = x.to(device)
                recon, mu, logvar = model(x)
                loss, _, _ = loss_function(recon, x, mu, logvar, 1.0)
                valid += loss.item() * x.size(0)
        valid /= len(valid_loader.dataset)
        print(f"epoch {epoch}: valid {valid:.3f}")
        if valid < best:
            best = valid
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, "vae.pt")


if __name__ == "__main__":
    main()
