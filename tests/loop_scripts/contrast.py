"""Two views of each sample; the loss compares all pairs of the batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import meshloom as ml

torch.manual_seed(0)
loader = ml.loader(
    DataLoader(
        TensorDataset(torch.randn(48, 10), torch.randn(48, 10)), batch_size=14, shuffle=True, drop_last=True
    )
)
model = ml.parallel(nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 6)))
optimizer = torch.optim.Adam(model.parameters(), 3e-3, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader))
criterion = nn.CrossEntropyLoss()


def info_nce_loss(features):
    n = len(features) // 2
    labels = torch.cat([torch.arange(n) for _ in range(2)])
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
    features = F.normalize(features, dim=1)
    similarity = features @ features.T
    mask = torch.eye(len(labels), dtype=torch.bool)
    labels, similarity = labels[~mask].view(2 * n, -1), similarity[~mask].view(2 * n, -1)
    positives = similarity[labels.bool()].view(2 * n, -1)
    negatives = similarity[~labels.bool()].view(2 * n, -1)
    return torch.cat([positives, negatives], dim=1) / 0.07, torch.zeros(2 * n, dtype=torch.long)


for one, other in loader:
    features = model(torch.cat([one, other]))
    features = torch.cat([ml.gather(each) for each in features.chunk(2)])
    logits, labels = info_nce_loss(features)
    loss = criterion(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
if ml.main:
    print(f"{loss.item():.4f}")
