"""A trainer as a class, that holds model, optimizer and schedule."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self, model, loader, lr, device):
        self.device = device
        self.model = model.to(device)
        self.loader = loader
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=4)
        self.best = None

    def train_epoch(self):
        self.model.train()
        total = 0.0
        for x, y in self.loader:
            x, y = x.to(self.device), y.to(self.device)
            self.optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.mse_loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            total += loss.item() * len(x)
        return total / len(self.loader.dataset)

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        return sum(float((self.model(x) - y).abs().sum()) for x, y in self.loader)

    def fit(self, epochs):
        for epoch in range(epochs):
            train, test = self.train_epoch(), self.evaluate()
            self.scheduler.step()
            if self.best is None or test < self.best[0]:
                self.best = (test, copy.deepcopy(self.model.state_dict()))
            print(f"{epoch} {train:.9f} {test:.9f}")
        self.model.load_state_dict(self.best[1])


def main():
    torch.manual_seed(12)
    x = torch.randn(17, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=6)
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    trainer = Trainer(net, loader, lr=1e-2, device=torch.device("cpu"))
    trainer.fit(3)
    print(f"{trainer.evaluate():.9f}")


if __name__ == "__main__":
    main()
