"""Classification of lines by an embedding bag: texts of several lengths, joined by the collate function with offsets."""

import os
import re

import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(4)
with open(os.__file__, encoding="utf-8") as source:
    lines = [line for line in source if re.search(r"[a-z]", line)][:512]
words = sorted({word for line in lines for word in re.findall(r"\w+", line)})
vocab = {word: index for index, word in enumerate(words)}
device = torch.device("cpu")


def collate_batch(batch):
    label_list, text_list, offsets = [], [], [0]
    for _label, _text in batch:
        label_list.append(_label)
        processed_text = torch.tensor([vocab[word] for word in re.findall(r"\w+", _text)], dtype=torch.int64)
        text_list.append(processed_text)
        offsets.append(processed_text.size(0))
    return torch.tensor(label_list), torch.cat(text_list), torch.tensor(offsets[:-1]).cumsum(dim=0)


class TextClassificationModel(nn.Module):
    def __init__(self, vocab_size, embed_dim, num_class):
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocab_size, embed_dim, sparse=False)
        self.fc = nn.Linear(embed_dim, num_class)
        self.init_weights()

    def init_weights(self):
        initrange = 0.5
        self.embedding.weight.data.uniform_(-initrange, initrange)
        self.fc.weight.data.uniform_(-initrange, initrange)
        self.fc.bias.data.zero_()

    def forward(self, text, offsets):
        return self.fc(self.embedding(text, offsets))


def train(dataloader):
    model.train()
    total_acc, total_count = 0, 0
    for idx, (label, text, offsets) in enumerate(dataloader):
        optimizer.zero_grad()
        predicted_label = model(text, offsets)
        loss = criterion(predicted_label, label)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        total_acc += (predicted_label.argmax(1) == label).sum().item()
        total_count += label.size(0)
        if idx % 20 == 0 and idx > 0:
            print(f"| epoch {epoch:3d} | accuracy {total_acc / total_count:8.3f}")


data = [(int(line.startswith("    ")), line) for line in lines]
train_dataloader = DataLoader(data, batch_size=8, shuffle=True, collate_fn=collate_batch)
model = TextClassificationModel(len(vocab), 16, 2).to(device)
EPOCHS, LR = 2, 5.0
criterion = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=LR)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1.0, gamma=0.1)

for epoch in range(1, EPOCHS + 1):
    train(train_dataloader)
    scheduler.step()
