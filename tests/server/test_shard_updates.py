"""Updates: messages, and means."""

import torch

from mirror.server.shard_updates import Update, mean


def test_a_message_has_it_all():
    update = Update(
        {0: torch.ones(2, 2)},
        {1: (torch.tensor([3, 1]), torch.ones(2, 2, dtype=torch.float64))},
        {2: torch.tensor(5)},
    )
    pieces = [((2, 2), torch.float32), ((4, 2), torch.float64), ((), torch.int64)]
    found = Update.from_message(*update.message(), pieces)
    assert torch.equal(found.gradients[0], update.gradients[0])
    assert all(torch.equal(a, b) for a, b in zip(found.rows[1], update.rows[1], strict=True))
    assert found.changes == {2: torch.tensor(5)}


def test_large_gradients_travel_in_their_own_memory():
    large, small = torch.randn(200, 100), torch.randn(3)
    header, buffers = Update({0: large, 1: small}).message()
    assert (header["large"], header["gradients"]) == ([0], [1])
    assert buffers[1].ctypes.data == large.data_ptr()
    specs = [((200, 100), torch.float32), ((3,), torch.float32)]
    found = Update.from_message(header, buffers, specs)
    assert torch.equal(found.gradients[0], large)
    assert torch.equal(found.gradients[1], small)


def test_means_are_weighted_and_what_is_missing_counts_as_zeros():
    one = Update({0: torch.ones(2)}, {1: (torch.tensor([0]), torch.ones(1, 2))},
                 {2: torch.tensor(4.0), 3: torch.tensor(1)})  # fmt: skip
    two = Update({0: torch.full((2,), 3.0), 4: torch.ones(1)}, {}, {2: torch.tensor(8.0)})
    found = mean([one, two], [3, 1])
    assert found.gradients[0].tolist() == [1.5, 1.5]
    assert found.gradients[4].tolist() == [0.25]
    assert found.rows[1][1].tolist() == [[0.75, 0.75]]
    assert found.changes == {2: torch.tensor(5.0), 3: torch.tensor(1)}
