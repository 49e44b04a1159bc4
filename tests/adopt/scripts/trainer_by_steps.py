"""A trainer in the style of minGPT: one run() with an iterator, callbacks and a config."""

import time
from collections import defaultdict
from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.utils.data import Dataset
from torch.utils.data.dataloader import DataLoader


class Sorting(Dataset):
    def __init__(self, n=512):
        g = torch.Generator().manual_seed(0)
        self.x = torch.randint(0, 4, (n, 6), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.x[i].sort()[0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(4, 16)
        self.mix = nn.Linear(96, 64)
        self.head = nn.Linear(64, 24)

    def forward(self, idx, targets=None):
        logits = self.head(self.mix(self.emb(idx).flatten(1)).relu()).view(-1, 6, 4)
        loss = None
        if targets is not None:
            loss = nn.functional.cross_entropy(logits.reshape(-1, 4), targets.reshape(-1))
        return logits, loss

    def configure_optimizers(self, config):
        return torch.optim.AdamW(self.parameters(), lr=config.learning_rate, betas=config.betas)


class Trainer:
    @staticmethod
    def get_default_config():
        return SimpleNamespace(
            max_iters=30,
            batch_size=32,
            learning_rate=3e-3,
            betas=(0.9, 0.95),
            grad_norm_clip=1.0,
            device="auto",
        )

    def __init__(self, config, model, train_dataset):
        self.config = config
        self.model = model
        self.optimizer = None
        self.train_dataset = train_dataset
        self.callbacks = defaultdict(list)
        if config.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        else:
            self.device = config.device
        self.model = self.model.to(self.device)
        self.iter_num = 0
        self.iter_time = 0.0

    def set_callback(self, onevent, callback):
        self.callbacks[onevent] = [callback]

    def trigger_callbacks(self, onevent):
        for callback in self.callbacks.get(onevent, []):
            callback(self)

    def run(self):
        model, config = self.model, self.config
        self.optimizer = model.configure_optimizers(config)
        train_loader = DataLoader(self.train_dataset, shuffle=True, batch_size=config.batch_size)
        model.train()
        self.iter_num = 0
        self.iter_time = time.time()
        data_iter = iter(train_loader)
        while True:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(train_loader)
                batch = next(data_iter)
            batch = [t.to(self.device) for t in batch]
            x, y = batch
            _, self.loss = model(x, y)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_norm_clip)
            self.optimizer.step()
            self.trigger_callbacks("on_batch_end")
            self.iter_num += 1
            if config.max_iters is not None and self.iter_num >= config.max_iters:
                break


torch.manual_seed(3407)
train_dataset = Sorting()
model = Net()
config = Trainer.get_default_config()
config.learning_rate = 1e-3
trainer = Trainer(config, model, train_dataset)
trainer.set_callback("on_batch_end", lambda t: print(t.iter_num, t.loss.item()))
trainer.run()
