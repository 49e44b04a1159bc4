"""A table of numbers, as in a notebook of a competition: split, scaler, early stopping, best weights."""

import copy
import os
import random

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, Dataset


class CFG:
    seed = 42
    epochs = 6
    batch_size = 32
    lr = 1e-3
    weight_decay = 1e-5
    patience = 2
    hidden = [64, 32]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seed_everything(seed):
    random.seed(seed)
    os.environ["PYTHONHASHSEED"] = str(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    torch.backends.cudnn.deterministic = True


seed_everything(CFG.seed)

X, y = load_breast_cancer(return_X_y=True)
X_train, X_valid, y_train, y_valid = train_test_split(X, y, test_size=0.2, random_state=CFG.seed, stratify=y)
scaler = StandardScaler()
X_train = scaler.fit_transform(X_train)
X_valid = scaler.transform(X_valid)


class TabularDataset(Dataset):
    def __init__(self, X, y=None):
        self.X = X
        self.y = y

    def __len__(self):
        return len(self.X)

    def __getitem__(self, idx):
        x = torch.tensor(self.X[idx], dtype=torch.float)
        if self.y is None:
            return {"x": x}
        return {"x": x, "y": torch.tensor(self.y[idx], dtype=torch.float)}


class Model(nn.Module):
    def __init__(self, num_features, hidden):
        super().__init__()
        layers = []
        last = num_features
        for size in hidden:
            layers += [nn.Linear(last, size), nn.BatchNorm1d(size), nn.SiLU(), nn.Dropout(0.2)]
            last = size
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(last, 1)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(-1)


train_ds = TabularDataset(X_train, y_train)
valid_ds = TabularDataset(X_valid, y_valid)
train_dl = DataLoader(train_ds, batch_size=CFG.batch_size, shuffle=True, drop_last=True)
valid_dl = DataLoader(valid_ds, batch_size=CFG.batch_size * 2, shuffle=False)


def train_fn(model, optimizer, scheduler, loss_fn, dataloader, device):
    model.train()
    final_loss = 0
    for data in dataloader:
        optimizer.zero_grad()
        inputs, targets = data["x"].to(device), data["y"].to(device)
        outputs = model(inputs)
        loss = loss_fn(outputs, targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        final_loss += loss.item()
    final_loss /= len(dataloader)
    return final_loss


def valid_fn(model, loss_fn, dataloader, device):
    model.eval()
    final_loss = 0
    valid_preds = []
    for data in dataloader:
        inputs, targets = data["x"].to(device), data["y"].to(device)
        with torch.no_grad():
            outputs = model(inputs)
        loss = loss_fn(outputs, targets)
        final_loss += loss.item()
        valid_preds.append(outputs.sigmoid().detach().cpu().numpy())
    final_loss /= len(dataloader)
    valid_preds = np.concatenate(valid_preds)
    return final_loss, valid_preds


def run_training():
    model = Model(num_features=X_train.shape[1], hidden=CFG.hidden)
    model.to(CFG.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=CFG.lr, weight_decay=CFG.weight_decay)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer=optimizer,
        pct_start=0.1,
        div_factor=1e3,
        max_lr=1e-2,
        epochs=CFG.epochs,
        steps_per_epoch=len(train_dl),
    )
    loss_fn = nn.BCEWithLogitsLoss()
    best_loss = np.inf
    best_weights = None
    counter = 0
    for epoch in range(CFG.epochs):
        train_loss = train_fn(model, optimizer, scheduler, loss_fn, train_dl, CFG.device)
        valid_loss, preds = valid_fn(model, loss_fn, valid_dl, CFG.device)
        auc = roc_auc_score(y_valid, preds)
        print(f"EPOCH: {epoch}, train_loss: {train_loss:.4f}, valid_loss: {valid_loss:.4f}, auc: {auc:.4f}")
        if valid_loss < best_loss:
            best_loss = valid_loss
            best_weights = copy.deepcopy(model.state_dict())
            torch.save(model.state_dict(), "best.pth")
            counter = 0
        else:
            counter += 1
            if counter >= CFG.patience:
                print("early stop")
                break
    model.load_state_dict(best_weights)
    return model


model = run_training()
