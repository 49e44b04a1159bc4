"""A recurrent language model, whose hidden state goes from one batch to the next."""

import os

import torch
import torch.nn as nn

torch.manual_seed(0)
with open(os.__file__, "rb") as f:
    corpus = torch.tensor(list(f.read()))
bptt, batch_size = 8, 4
nbatch = corpus.size(0) // batch_size
source = corpus.narrow(0, 0, nbatch * batch_size).view(batch_size, -1).t().contiguous()


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(256, 16)
        self.rnn = nn.GRU(16, 16)
        self.decoder = nn.Linear(16, 256)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return self.decoder(output).view(-1, 256), hidden


def repackage_hidden(h):
    return h.detach()


def get_batch(source, i):
    return source[i : i + bptt], source[i + 1 : i + 1 + bptt].view(-1)


model = RNNModel()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
hidden = torch.zeros(1, batch_size, 16)
for i in range(0, 200, bptt):
    data, targets = source[i : i + bptt], source[i + 1 : i + 1 + bptt].view(-1)
    model.zero_grad()
    hidden = repackage_hidden(hidden)
    output, hidden = model(data, hidden)
    loss = criterion(output, targets)
    loss.backward()
    optimizer.step()
