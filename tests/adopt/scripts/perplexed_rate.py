"""Letters of Python's own text: the rate falls where the perplexity of held-out text is not better by a twentieth of a letter."""

import math
import string

import torch
import torch.nn as nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
text = "".join(
    each.__doc__ or "" for each in (str, dict, list, int, float, bytes, set, tuple, range, type)
).lower()
letters = sorted(set(text) | set(string.ascii_lowercase))
codes = torch.tensor([letters.index(each) for each in text])
length = 8
windows = codes.unfold(0, length + 1, length)
train_set = TensorDataset(windows[:160, :-1], windows[:160, 1:])
valid_set = TensorDataset(windows[160:220, :-1], windows[160:220, 1:])
train_loader = DataLoader(train_set, batch_size=16, shuffle=True)
valid_loader = DataLoader(valid_set, batch_size=20)


class Letters(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.table = nn.Embedding(len(letters), width)
        self.hidden = nn.Linear(width, 2 * width)
        self.out = nn.Linear(2 * width, len(letters))

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(self.table(x))))


model = Letters()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05, threshold_mode="abs")


@torch.no_grad()
def perplexity():
    model.eval()
    total = 0.0
    for inputs, targets in valid_loader:
        scores = model(inputs)
        total += criterion(scores.flatten(0, 1), targets.flatten()).item() * len(inputs)
    return math.exp(total / len(valid_set))


for epoch in range(8):
    model.train()
    for inputs, targets in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
    ppl = perplexity()
    scheduler.step(ppl)
    print(f"epoch {epoch}: perplexity {ppl:.2f}, rate {optimizer.param_groups[0]['lr']:g}")
