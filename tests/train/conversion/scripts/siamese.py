"""Two images through one network, and whether they show the same."""

import torch
import torch.nn as nn
import torch.optim as optim


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(9, 6), nn.ReLU())
        self.fc = nn.Sequential(nn.Linear(12, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
        self.sigmoid = nn.Sigmoid()

    def forward_once(self, x):
        return self.backbone(x).view(x.size()[0], -1)

    def forward(self, input1, input2):
        output1, output2 = self.forward_once(input1), self.forward_once(input2)
        return self.sigmoid(self.fc(torch.cat((output1, output2), 1)))


def make_optimizer(name, network):
    if name == "sgd":
        return optim.SGD(network.parameters(), lr=0.1)
    elif name == "adadelta":
        return optim.Adadelta(network.parameters(), lr=1.0)
    raise ValueError(name)


def main():
    torch.manual_seed(4)
    device = "cpu"
    first, second = torch.randn(10, 9), torch.randn(10, 9)
    targets = torch.randint(2, (10,)).to(first)
    model = SiameseNetwork().to(device)
    optimizer = make_optimizer("adadelta", model)
    criterion = nn.BCELoss()
    for _ in range(2):
        for at in range(0, 10, 4):
            images_1, images_2 = first[at : at + 4].to(device), second[at : at + 4].to(device)
            optimizer.zero_grad()
            outputs = model(images_1, images_2).squeeze(1)
            loss = criterion(outputs, targets[at : at + 4].to(device))
            loss.backward()
            optimizer.step()
            print(f"{loss.item():.9f}")


main()
