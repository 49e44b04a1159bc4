"""Two input tensors, tuple assignments in the set-up, the norm of the gradient, a loss of two terms."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
epochs, batch_size, lr = 3, 32, 1e-2
n = 256
image, table = torch.randn(n, 1, 8, 8), torch.randn(n, 5)
target = (image.mean((1, 2, 3)) + table[:, 0]).unsqueeze(1)


class Fusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
        self.fc = nn.Linear(4 * 36, 8)
        self.tab = nn.Linear(5, 8)
        self.out = nn.Linear(16, 1)
        self.aux = nn.Linear(8, 1)

    def forward(self, image, table):
        a, b = self.fc(self.conv(image)), self.tab(table)
        return self.out(torch.cat([a, b], 1).relu()), self.aux(b)


train_loader = DataLoader(TensorDataset(image, table, target), batch_size=batch_size, shuffle=True)
device = "cuda" if torch.cuda.is_available() else "cpu"
net = Fusion().to(device)
criterion, optimizer = nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
history = {"loss": [], "norm": []}
global_step = 0
for epoch in range(epochs):
    running_loss = 0.0
    for img, tab, tgt in train_loader:
        img, tab, tgt = img.to(device), tab.to(device), tgt.to(device)
        pred, aux = net(img, tab)
        main_loss = criterion(pred, tgt)
        aux_loss = criterion(aux, tgt)
        loss = main_loss + 0.3 * aux_loss
        optimizer.zero_grad()
        loss.backward()
        total_norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 2.0)
        optimizer.step()
        history["loss"].append(loss.item())
        history["norm"].append(total_norm.item())
        global_step += 1
        running_loss += loss.item()
    print(f"epoch {epoch}: {running_loss / len(train_loader):.3f}")
