"""A polynomial that is fitted to points which are drawn anew for every step."""

import torch
import torch.nn.functional as F

POLY_DEGREE = 4
W_target = torch.randn(POLY_DEGREE, 1, generator=torch.Generator().manual_seed(0)) * 5
b_target = torch.tensor([2.0])


def make_features(x):
    """Builds features i.e. a matrix with columns [x, x^2, x^3, x^4]."""
    x = x.unsqueeze(1)
    return torch.cat([x**i for i in range(1, POLY_DEGREE + 1)], 1)


def get_batch(batch_size=32):
    """Builds a batch i.e. (x, f(x)) pair."""
    random = torch.randn(batch_size)
    x = make_features(random)
    y = x.mm(W_target) + b_target.item()
    return x, y


fc = torch.nn.Linear(W_target.size(0), 1)
optimizer = torch.optim.SGD(fc.parameters(), lr=1e-3)
for batch_idx in range(200):
    batch_x, batch_y = get_batch()
    loss = F.smooth_l1_loss(fc(batch_x), batch_y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if loss.item() < 1e-3:
        break
print(f"Loss: {loss.item():.6f} after {batch_idx} batches")
