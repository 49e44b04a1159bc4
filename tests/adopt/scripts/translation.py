"""A sequence-to-sequence transformer that learns to reverse words of Python's own text, with masks and a collate function."""

import math
import os
import re
from timeit import default_timer as timer

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.data import DataLoader

torch.manual_seed(0)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAD, BOS, EOS = 0, 1, 2
LENGTH = 6

with open(os.__file__, encoding="utf-8") as text:
    WORDS = sorted({word for word in re.findall("[a-z]+", text.read()) if len(word) == LENGTH})
train_data = [(word, word[::-1]) for word in WORDS]


def encode(word):
    return torch.tensor([BOS, *(3 + ord(letter) - ord("a") for letter in word), EOS])


def collate_fn(batch):
    src_batch, tgt_batch = [], []
    for src_sample, tgt_sample in batch:
        src_batch.append(encode(src_sample))
        tgt_batch.append(encode(tgt_sample))
    return torch.stack(src_batch), torch.stack(tgt_batch)


class PositionalEncoding(nn.Module):
    def __init__(self, emb_size, maxlen=16):
        super().__init__()
        den = torch.exp(-torch.arange(0, emb_size, 2) * math.log(10000) / emb_size)
        pos = torch.arange(0, maxlen).reshape(maxlen, 1)
        pos_embedding = torch.zeros((maxlen, emb_size))
        pos_embedding[:, 0::2] = torch.sin(pos * den)
        pos_embedding[:, 1::2] = torch.cos(pos * den)
        self.register_buffer("pos_embedding", pos_embedding)

    def forward(self, token_embedding: Tensor):
        return token_embedding + self.pos_embedding[: token_embedding.size(1)]


class Seq2SeqTransformer(nn.Module):
    def __init__(self, num_layers, emb_size, nhead, vocab_size):
        super().__init__()
        self.transformer = nn.Transformer(
            d_model=emb_size, nhead=nhead, num_encoder_layers=num_layers, num_decoder_layers=num_layers,
            dim_feedforward=2 * emb_size, dropout=0.0, batch_first=True,
        )  # fmt: skip
        self.generator = nn.Linear(emb_size, vocab_size)
        self.tok_emb = nn.Embedding(vocab_size, emb_size)
        self.positional_encoding = PositionalEncoding(emb_size)

    def forward(self, src, trg, tgt_mask):
        outs = self.transformer(
            self.positional_encoding(self.tok_emb(src)),
            self.positional_encoding(self.tok_emb(trg)),
            tgt_mask=tgt_mask,
        )
        return self.generator(outs)


def generate_square_subsequent_mask(sz):
    return torch.triu(torch.full((sz, sz), float("-inf")), diagonal=1)


VOCAB_SIZE = 29
EMB_SIZE = 16
NHEAD = 2
BATCH_SIZE = 8
NUM_LAYERS = 1

transformer = Seq2SeqTransformer(NUM_LAYERS, EMB_SIZE, NHEAD, VOCAB_SIZE)
for p in transformer.parameters():
    if p.dim() > 1:
        nn.init.xavier_uniform_(p)

transformer = transformer.to(DEVICE)
loss_fn = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(transformer.parameters(), lr=0.001, betas=(0.9, 0.98), eps=1e-9)


def train_epoch(model, optimizer):
    model.train()
    losses = 0
    train_dataloader = DataLoader(train_data, batch_size=BATCH_SIZE, collate_fn=collate_fn)

    for src, tgt in train_dataloader:
        src = src.to(DEVICE)
        tgt = tgt.to(DEVICE)

        tgt_input = tgt[:, :-1]
        tgt_mask = generate_square_subsequent_mask(tgt_input.size(1))
        logits = model(src, tgt_input, tgt_mask)

        optimizer.zero_grad()

        tgt_out = tgt[:, 1:]
        loss = loss_fn(logits.reshape(-1, logits.shape[-1]), tgt_out.reshape(-1))
        loss.backward()

        optimizer.step()
        losses += loss.item()

    return losses / len(list(train_dataloader))


NUM_EPOCHS = 2
for epoch in range(1, NUM_EPOCHS + 1):
    start_time = timer()
    train_loss = train_epoch(transformer, optimizer)
    print(f"Epoch: {epoch}, Train loss: {train_loss:.3f}, time = {timer() - start_time:.3f}s")
