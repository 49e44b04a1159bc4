"""Texts of similar lengths in a batch, by a batch sampler of one's own."""

import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler


class Texts(Dataset):
    def __init__(self, num):
        generator = torch.Generator().manual_seed(0)
        self.texts = [
            torch.randint(1, 50, (int(torch.randint(3, 20, (), generator=generator)),), generator=generator)
            for _ in range(num)
        ]
        self.labels = [int(text.float().mean() > 25) for text in self.texts]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        return self.texts[i], self.labels[i]


class BucketSampler(Sampler):
    def __init__(self, lengths, batch_size):
        self.lengths = lengths
        self.batch_size = batch_size

    def __iter__(self):
        order = sorted(range(len(self.lengths)), key=lambda i: self.lengths[i])
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        random.shuffle(batches)
        yield from batches

    def __len__(self):
        return (len(self.lengths) + self.batch_size - 1) // self.batch_size


def collate(samples):
    texts, labels = zip(*samples)
    return pad_sequence(texts, batch_first=True), torch.tensor(labels)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=0)
        self.rnn = nn.GRU(16, 24, batch_first=True)
        self.out = nn.Linear(24, 2)

    def forward(self, tokens):
        states, _ = self.rnn(self.embedding(tokens))
        mask = (tokens != 0).unsqueeze(-1)
        return self.out((states * mask).sum(1) / mask.sum(1))


random.seed(2)
torch.manual_seed(2)
dataset = Texts(160)
sampler = BucketSampler([len(text) for text, _ in dataset], batch_size=16)
loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
criterion = nn.CrossEntropyLoss()
for epoch in range(3):
    for tokens, labels in loader:
        loss = criterion(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
