# %%
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# %%
torch.manual_seed(0)
lr = 0.05
bs = 20
epochs = 4
x_train, y_train = torch.randn(200, 12), torch.randint(0, 3, (200,))
x_valid, y_valid = torch.randn(60, 12), torch.randint(0, 3, (60,))
# %%
train_ds, valid_ds = TensorDataset(x_train, y_train), TensorDataset(x_valid, y_valid)
train_dl, valid_dl = (
    DataLoader(train_ds, batch_size=bs, shuffle=True),
    DataLoader(valid_ds, batch_size=bs * 2),
)


def loss_batch(model, loss_func, xb, yb, opt=None):
    loss = loss_func(model(xb), yb)
    if opt is not None:
        loss.backward()
        opt.step()
        opt.zero_grad()
    return loss.item(), len(xb)


def get_model():
    model = nn.Sequential(
        nn.Unflatten(1, (1, 12)),
        nn.Conv1d(1, 8, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(4),
        nn.Flatten(),
        nn.Linear(32, 3),
    )
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def fit(epochs, model, loss_func, opt, train_dl, valid_dl):
    for epoch in range(epochs):
        model.train()
        for xb, yb in train_dl:
            loss_batch(model, loss_func, xb, yb, opt)
        model.eval()
        with torch.no_grad():
            losses, nums = zip(*[loss_batch(model, loss_func, xb, yb) for xb, yb in valid_dl], strict=True)
        val_loss = sum(loss * n for loss, n in zip(losses, nums, strict=True)) / sum(nums)
        print(epoch, val_loss)


model, opt = get_model()
fit(epochs, model, F.cross_entropy, opt, train_dl, valid_dl)
