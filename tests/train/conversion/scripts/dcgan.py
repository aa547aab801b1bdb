"""Two networks against each other, with batch normalisation and weights of their own."""

import torch
import torch.nn as nn
import torch.optim as optim

torch.manual_seed(999)
device = torch.device("cpu")


def weights_init(m):
    name = m.__class__.__name__
    if name.find("Conv") != -1:
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif name.find("BatchNorm") != -1:
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


netG = nn.Sequential(
    nn.ConvTranspose2d(5, 4, 4, bias=False),
    nn.BatchNorm2d(4),
    nn.ReLU(True),
    nn.ConvTranspose2d(4, 1, 4, 2, 1, bias=False),
    nn.Tanh(),
).to(device)
netG.apply(weights_init)

netD = nn.Sequential(
    nn.Conv2d(1, 4, 4, 2, 1, bias=False),
    nn.BatchNorm2d(4),
    nn.LeakyReLU(0.2),
    nn.Conv2d(4, 1, 4, bias=False),
    nn.Sigmoid(),
).to(device)
netD.apply(weights_init)

criterion = nn.BCELoss()
optimizerD = optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))

for i in range(3):
    real = torch.randn(7, 1, 8, 8).to(device)
    netD.zero_grad()
    output = netD(real).view(-1)
    errD_real = criterion(output, torch.ones(7, device=device))
    errD_real.backward()
    fake = netG(torch.randn(7, 5, 1, 1, device=device))
    output = netD(fake.detach()).view(-1)
    errD_fake = criterion(output, torch.zeros(7, device=device))
    errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    output = netD(fake).view(-1)
    errG = criterion(output, torch.ones(7, device=device))
    errG.backward()
    optimizerG.step()
    print(f"{(errD_real + errD_fake).item():.9f} {errG.item():.9f}")
