"""The drawn digits: the same everywhere, different enough to be learnt, and not by heart."""

import numpy as np
import torch
from torch import nn

from mirror.tools.demo_images import load_drawn
from mirror.tools.drawn_digits import SIZE, draw_digits


def test_a_seed_draws_the_same_images():
    (x, y), (again, labels) = draw_digits(50, seed=3), draw_digits(50, seed=3)
    assert (x.shape, x.dtype, y.dtype) == ((50, SIZE, SIZE), np.uint8, np.int64)
    assert np.array_equal(x, again)
    assert np.array_equal(y, labels)
    assert not np.array_equal(x, draw_digits(50, seed=4)[0])


def test_every_digit_is_there_equally_often():
    images = load_drawn()
    labels = torch.cat([images.train_y, images.test_y])
    assert torch.bincount(labels).tolist() == [200] * 10
    assert images.train_x.shape == (1600, 1, SIZE, SIZE)
    assert -1 <= images.train_x.min() < images.train_x.max() <= 1
    assert len(images.test_y) == 400


def test_digits_stay_inside_the_image_and_are_to_be_told_apart():
    images = load_drawn()
    edge = torch.cat([images.test_x[..., 0, :], images.test_x[..., -1, :]])
    assert edge.mean() < images.test_x[..., 3:-3, 3:-3].mean() - 0.3
    torch.manual_seed(0)
    model = nn.Linear(SIZE * SIZE, 10)
    x, y = images.train_x.flatten(1), images.train_y
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=30)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y) + 1e-3 * model.weight.pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    right = (model(images.test_x.flatten(1)).argmax(1) == images.test_y).float().mean()
    assert 0.6 < right < 0.98  # a line between two digits is not enough; chance is 0.1
