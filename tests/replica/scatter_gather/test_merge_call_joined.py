"""What replicas give at one place, joined for one call."""

import torch
from torch import nn

from mirror.device.device_mesh import DeviceMesh
from mirror.replica.scatter_gather.merge_call_joined import Join


def test_what_replicas_give_is_joined_where_the_first_one_is():
    first, second = torch.device("meta"), torch.device("cpu")
    join = Join(nn.Identity(), DeviceMesh([[first], [second]]), [1.0, 2.0])
    joined = join(torch.ones(1, 3, device=first), torch.ones(2, 3, device=second))
    assert joined.device == first
    assert joined.shape == (3, 3)
