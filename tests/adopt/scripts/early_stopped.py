"""A regression with a validation loss after each epoch, the best weights saved, and a count of epochs without a better one."""

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

BATCH_SIZE = 16
EPOCHS = 30
PATIENCE = 4

torch.manual_seed(3)
features, target = load_diabetes(return_X_y=True)
features = torch.tensor(features, dtype=torch.float32) * 20
target = torch.tensor(target, dtype=torch.float32).unsqueeze(1) / 100
dataset = TensorDataset(features[:432], target[:432])
train_set, val_set = random_split(dataset, [352, 80], generator=torch.Generator().manual_seed(0))
train_loader = DataLoader(train_set, batch_size=BATCH_SIZE, shuffle=True)
val_loader = DataLoader(val_set, batch_size=BATCH_SIZE)

model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 1))
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

best_val_loss = float("inf")
epochs_no_improve = 0
history = {"train": [], "val": []}
for epoch in range(EPOCHS):
    model.train()
    running_loss = 0.0
    for xb, yb in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        running_loss += loss.item() * xb.size(0)
    train_loss = running_loss / len(train_loader.dataset)

    model.eval()
    val_loss = 0.0
    with torch.no_grad():
        for xb, yb in val_loader:
            preds = model(xb)
            val_loss += criterion(preds, yb).item()
    val_loss /= len(val_loader)
    history["train"].append(train_loss)
    history["val"].append(val_loss)
    print(f"epoch {epoch + 1}: train {train_loss:.4f} val {val_loss:.4f}")

    if val_loss < best_val_loss:
        best_val_loss = val_loss
        epochs_no_improve = 0
        torch.save(model.state_dict(), "best_model.pt")
    else:
        epochs_no_improve += 1
        if epochs_no_improve >= PATIENCE:
            print("Early stopping!")
            break
