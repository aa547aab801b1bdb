"""A GAN: two models and two optimizers in one step, on all GPUs or four simulated devices.

Everything happens in ``train_step``, which each replica calls with its part of the batch: the
discriminator learns to tell scikit-learn's digits from the generator's, then the generator learns
to deceive it. Each replica draws its own noise. At the end it prints digits of its own.

    python examples/gan.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mirror

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    needs = "this example needs scikit-learn: pip install 'mirror-strategy[examples]'"
    raise SystemExit(f"{error}; {needs}") from None

NUM_EPOCHS = 50
NOISE_SIZE = 32
SHADES = " .:-=+*#%@"


def make_generator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NOISE_SIZE, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.Tanh(),
    )


def make_discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 256),
        nn.LeakyReLU(0.2),
        nn.Dropout(),
        nn.Linear(256, 256),
        nn.LeakyReLU(0.2),
        nn.Dropout(),
        nn.Linear(256, 1),
    )


def looks_real(logits: Tensor, real: bool) -> Tensor:
    """The loss of a discriminator that should have said "real", or not."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def show(images: Tensor) -> str:
    """Draws images of 8x8 pixels in [-1, 1] side by side, each pixel two characters wide."""
    shades = ((images.clamp(-1, 1) + 1) / 2 * (len(SHADES) - 1)).round().int()
    rows = shades.view(-1, 8, 8).transpose(0, 1).flatten(1).tolist()
    return "\n".join("".join(SHADES[shade] * 2 for shade in row).rstrip() for row in rows)


def main() -> None:
    torch.manual_seed(0)
    images = torch.tensor(load_digits().data / 8 - 1, dtype=torch.float32)
    dataset = TensorDataset(images)
    loader = DataLoader(dataset, batch_size=256, shuffle=True, drop_last=True)

    # All GPUs; without one, four simulated devices.
    devices = None if torch.cuda.is_available() else ["cpu"] * 4
    with mirror.MirroredStrategy(devices) as strategy:
        with strategy.scope():
            generator, discriminator = make_generator(), make_discriminator()
            betas = (0.5, 0.999)
            optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=betas)
            optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=betas)

        def train_step(batch: tuple[Tensor]) -> dict[str, Tensor]:
            (real,) = batch
            noise = torch.randn(len(real), NOISE_SIZE, device=real.device)
            fake = generator(noise)

            loss_d = looks_real(discriminator(real), True)
            loss_d = loss_d + looks_real(discriminator(fake.detach()), False)
            optimizer_d.zero_grad()
            loss_d.backward()
            optimizer_d.step()

            # This backward pass leaves gradients in the discriminator as well, which the next
            # step's zero_grad drops, as on one device.
            loss_g = looks_real(discriminator(fake), True)
            optimizer_g.zero_grad()
            loss_g.backward()
            optimizer_g.step()
            return {"generator": loss_g.detach(), "discriminator": loss_d.detach()}

        for epoch in range(1, NUM_EPOCHS + 1):
            for batch in strategy.distribute_dataset(loader):
                losses = strategy.run(train_step, args=(batch,))
            if epoch % 10 == 0:
                means = strategy.reduce("mean", losses)
                print(
                    f"epoch {epoch}, last batch: generator {means['generator']:.3f}, "
                    f"discriminator {means['discriminator']:.3f}"
                )

        num_equal = strategy.check_replicas()
        print(f"all {num_equal} parameters of both models are equal on all replicas\n")
        with torch.no_grad():
            print(show(generator(torch.randn(6, NOISE_SIZE)).cpu()))


if __name__ == "__main__":
    main()
