"""GANs: two models, two optimizers, one of them frozen while the other learns."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from tests.training.programs import SIZES, Net, adam


@pytest.mark.parametrize("detach", [True, False], ids=["detached", "through both"])
def test_a_gan_with_two_models_and_two_optimizers(detach, same):
    def script(place):
        generator = place.put(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)))
        critic = place.put(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
        of_generator = torch.optim.Adam(generator.parameters(), lr=0.02, betas=(0.5, 0.9))
        of_critic = torch.optim.Adam(critic.parameters(), lr=0.02, betas=(0.5, 0.9))

        def bce(logits, target):
            return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))

        def step(real, noise):
            fake = generator(noise)
            of_critic.zero_grad()
            judged = critic(fake.detach() if detach else fake)
            critic_loss = bce(critic(real), 1.0) + bce(judged, 0.0)
            critic_loss.backward(retain_graph=not detach)
            of_critic.step()
            # Without detach the critic's loss has filled the generator's gradients, too.
            of_generator.zero_grad()
            generator_loss = bce(critic(generator(noise)), 1.0)
            generator_loss.backward()
            of_generator.step()
            return {"critic": critic_loss.detach(), "generator": generator_loss.detach()}

        losses = [place.step(step, torch.randn(n, 6), torch.randn(n, 4)) for n in SIZES]
        return losses, generator, critic, of_generator, of_critic

    same(script)


def test_a_gan_whose_critic_is_frozen_while_the_generator_learns(same):
    def script(place):
        generator, critic = place.put(nn.Linear(4, 6)), place.put(Net(classes=1))
        optimizers = adam(generator), adam(critic)

        def critic_step(real, noise):
            with torch.no_grad():
                fake = generator(noise)
            optimizers[1].zero_grad()
            (critic(fake).mean() - critic(real).mean()).backward()
            optimizers[1].step()
            with torch.no_grad():
                for p in critic.parameters():
                    p.clamp_(-0.1, 0.1)

        def generator_step(real, noise):
            optimizers[0].zero_grad()
            (-critic(generator(noise)).mean()).backward()
            optimizers[0].step()

        for n in SIZES:
            batch = torch.randn(n, 6), torch.randn(n, 4)
            critic.requires_grad_(True)
            place.step(critic_step, *batch)
            critic.requires_grad_(False)
            place.step(generator_step, *batch)
        return generator, critic, *optimizers

    same(script)
