"""Words that follow words: an LSTM with tied weights, clipped gradients, and SGD by hand."""

import math

import torch
from torch import nn

WORDS, WIDTH = 12, 6


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(WIDTH, WORDS)
        self.decoder.weight = self.encoder.weight

    def forward(self, words):
        output, _ = self.rnn(self.encoder(words))
        return self.decoder(output)


torch.manual_seed(1111)
device = torch.device("cpu")
corpus = torch.randint(WORDS, (9, 21)).to(device)
model = RNNModel().to(device)
criterion = nn.CrossEntropyLoss()
params = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(params, lr=2.0)
for start in range(0, 20, 5):
    inputs, targets = corpus[:, start : start + 5], corpus[:, start + 1 : start + 6]
    optimizer.zero_grad()
    output = model(inputs)
    loss = criterion(output.reshape(-1, WORDS), targets.reshape(-1))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    print(f"perplexity {math.exp(loss.item()):.9f} norm {float(norm):.9f}")
