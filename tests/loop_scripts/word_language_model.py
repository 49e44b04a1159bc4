"""Time first: a corpus in columns, targets flattened over time and batch, hidden states between segments, an update by hand."""

import torch
from torch import nn

import meshloom as ml

torch.manual_seed(1111)
ntoken, bptt, lr = 40, 7, 2.0
corpus = torch.randint(0, ntoken, (1000,))


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data[: nbatch * bsz].view(bsz, -1).t().contiguous()


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.rnn, self.decoder = (
            nn.Embedding(ntoken, 12),
            nn.LSTM(12, 12, 2),
            nn.Linear(12, ntoken),
        )

    def forward(self, x, hidden):
        output, hidden = self.rnn(self.encoder(x), hidden)
        return self.decoder(output).view(-1, ntoken), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(2, bsz, 12), weight.new_zeros(2, bsz, 12)


train_data = ml.share(batchify(corpus, 10), dim=1)
model = ml.parallel(RNNModel())
criterion = nn.CrossEntropyLoss()
hidden = model.init_hidden(train_data.size(1))
for i in range(0, 35, bptt):
    data, targets = train_data[i : i + bptt], train_data[i + 1 : i + 1 + bptt].reshape(-1)
    model.zero_grad()
    hidden = tuple(h.detach() for h in hidden)
    output, hidden = model(data, hidden)
    loss = criterion(output, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-lr)
print(f"{float(ml.mean(loss.detach())):.4f}")
