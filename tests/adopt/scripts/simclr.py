"""Two views of each image, pulled together and pushed from the others of the batch."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(7)


class ContrastiveTransform:
    def __init__(self, n_views=2):
        self.n_views = n_views

    def view(self, x):
        shift = int(torch.randint(-1, 2, ()))
        return torch.roll(x, shift, dims=-1) + 0.1 * torch.randn_like(x)

    def __call__(self, x):
        return [self.view(x) for _ in range(self.n_views)]


class DigitViews(Dataset):
    def __init__(self, transform):
        self.images, self.labels = load_digits(return_X_y=True)
        self.transform = transform

    def __len__(self):
        return 600

    def __getitem__(self, index):
        image = torch.tensor(self.images[index], dtype=torch.float32).view(1, 8, 8) / 16
        return self.transform(image), self.labels[index]


class SimCLR(nn.Module):
    def __init__(self, hidden=32, out=16):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, hidden)
        )
        self.projector = nn.Sequential(nn.ReLU(), nn.Linear(hidden, out))

    def forward(self, x):
        return self.projector(self.backbone(x))


def info_nce_loss(features, batch_size, n_views, temperature):
    labels = torch.cat([torch.arange(batch_size) for i in range(n_views)], dim=0)
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
    features = F.normalize(features, dim=1)
    similarity_matrix = torch.matmul(features, features.T)
    mask = torch.eye(labels.shape[0], dtype=torch.bool)
    labels = labels[~mask].view(labels.shape[0], -1)
    similarity_matrix = similarity_matrix[~mask].view(similarity_matrix.shape[0], -1)
    positives = similarity_matrix[labels.bool()].view(labels.shape[0], -1)
    negatives = similarity_matrix[~labels.bool()].view(similarity_matrix.shape[0], -1)
    logits = torch.cat([positives, negatives], dim=1)
    labels = torch.zeros(logits.shape[0], dtype=torch.long)
    return logits / temperature, labels


train_loader = DataLoader(DigitViews(ContrastiveTransform()), batch_size=24, shuffle=True, drop_last=True)
model = SimCLR()
optimizer = torch.optim.Adam(model.parameters(), 3e-4, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
    optimizer, T_max=len(train_loader), eta_min=0, last_epoch=-1
)
criterion = torch.nn.CrossEntropyLoss()
n_iter = 0
for epoch_counter in range(3):
    for images, _ in train_loader:
        images = torch.cat(images, dim=0)
        features = model(images)
        logits, labels = info_nce_loss(features, 24, 2, 0.07)
        loss = criterion(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if n_iter % 10 == 0:
            print(n_iter, loss.item())
        n_iter += 1
    if epoch_counter >= 1:
        scheduler.step()
