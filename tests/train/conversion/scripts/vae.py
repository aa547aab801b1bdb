"""A variational autoencoder: several outputs, a loss that is a sum, and noise from outside."""

import torch
from torch import nn, optim
from torch.nn import functional as F


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 8)
        self.fc21 = nn.Linear(8, 3)
        self.fc22 = nn.Linear(8, 3)
        self.fc3 = nn.Linear(3, 16)

    def forward(self, x, eps):
        h1 = F.relu(self.fc1(x.view(-1, 16)))
        mu, logvar = self.fc21(h1), self.fc22(h1)
        z = mu + eps * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc3(z)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 16), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


if __name__ == "__main__":
    torch.manual_seed(1)
    device = torch.device("cpu")
    images = torch.rand(10, 1, 4, 4)
    model = VAE().to(device)
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(2):
        for data in images.split(4):
            data = data.to(device)
            optimizer.zero_grad()
            recon_batch, mu, logvar = model(data, torch.randn(len(data), 3, device=device))
            loss = loss_function(recon_batch, data, mu, logvar)
            loss.backward()
            optimizer.step()
            print(f"{loss.item() / len(data):.9f}")
