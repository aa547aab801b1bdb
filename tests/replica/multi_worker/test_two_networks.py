"""Two networks of one strategy over workers, each with its optimizer and passes: as one device."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.replica.multi_worker.beside_one_device import OneDevice, Worker

SIZES = (8, 5, 2, 1, 8)  # of global batches: a worker without examples among them


def gan(place, order, is_detached):
    """Alternates steps; keeps what gradients there are after each, and the last values."""
    with place.scope():
        generator = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
        critic = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    of_generator, of_critic = (
        torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=0.1)
        for model in (generator, critic)
    )

    def critics_loss(x, _):
        fake = generator(x)
        judged, real = critic(fake.detach() if is_detached else fake), critic(x + 1)
        wrong = F.binary_cross_entropy_with_logits(judged, torch.zeros_like(judged))
        return wrong + F.binary_cross_entropy_with_logits(real, torch.ones_like(real))

    def generators_loss(x, _):
        judged = critic(generator(x))
        return F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))

    steps = {"c": (of_critic, critics_loss), "g": (of_generator, generators_loss)}
    for x, y in place.batches:
        for which in order:
            optimizer, loss_of = steps[which]
            optimizer.zero_grad()
            place.backward(loss_of, x.double(), y)
            optimizer.step()
            place.keep(generator, critic)
    place.keep(generator, critic, grads=False)
    return place.kept


def on_worker(way, *args):
    place = Worker((1, 1), way, SIZES)
    try:
        return gan(place, *args)
    finally:
        place.strategy.close()


@pytest.mark.parametrize("is_detached", [True, False], ids=["detached", "through both"])
@pytest.mark.parametrize(("way", "order"), [(1, "cg"), (3, "gcc")])
def test_a_pass_of_one_network_leaves_the_others_gradients(worker_pool, way, order, is_detached):
    expected = gan(OneDevice(SIZES), order, is_detached)
    for found in worker_pool(2).run(on_worker, way, order, is_detached):
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine is None) == (theirs is None)
            if theirs is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)
