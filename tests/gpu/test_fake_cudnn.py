"""The simulated cuDNN itself: where it moves the weights of recurrent layers, and gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.gpu.cudnn import are_flat
from tests.gpu.fake import FakeGpus


@pytest.fixture
def gpus():
    with FakeGpus(2) as gpus:
        yield gpus


def layer_on(device, kind=nn.LSTM, **options):
    torch.manual_seed(0)
    return kind(2, 3, batch_first=True, **options).to(device)


def test_a_move_to_a_gpu_puts_the_weights_into_one_buffer(gpus):
    layer = layer_on("cuda:1", num_layers=2, bidirectional=True)
    assert gpus.cudnn.num_flattenings == 1
    assert are_flat(layer._flat_weights)
    assert {str(weight.device) for weight in layer.parameters()} == {"cuda:1"}
    assert_equal(layer, layer_on("cpu", num_layers=2, bidirectional=True))


def assert_equal(layer, other):
    for mine, theirs in zip(layer.parameters(), other.parameters(), strict=True):
        assert mine.tolist() == theirs.tolist()


def test_flattening_moves_what_it_is_given_and_no_other_tensor_there(gpus):
    layer = layer_on("cuda:0", nn.GRU)
    weight = layer.weight_hh_l0
    alias = weight.detach()
    layer.flatten_parameters()
    assert layer.weight_hh_l0 is weight
    assert weight.data_ptr() != alias.data_ptr()
    weight.data.zero_()
    assert alias.count_nonzero() > 0


@pytest.mark.parametrize(
    "scatter",
    [
        lambda layer: setattr(layer.bias_hh_l0, "data", layer.bias_hh_l0.data.clone()),
        lambda layer: setattr(layer, "bias_hh_l0", layer.bias_ih_l0),  # never flat
    ],
)
def test_weights_elsewhere_are_compacted_at_every_call_with_a_warning(gpus, scatter):
    layer, x = layer_on("cuda:0"), torch.ones(1, 2, 2, device="cuda:0")
    layer(x)
    scatter(layer)
    with pytest.warns(UserWarning, match="not part of single contiguous chunk"):
        layer(x)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("dtype", [torch.float, torch.double])
def test_gradients_are_those_of_the_cpu_in_one_buffer(gpus, kind, dtype):
    layer = layer_on("cuda:0", kind).to(dtype)
    plain = copy.deepcopy(layer).cpu()
    x = torch.arange(12.0).view(2, 3, 2).to(dtype)
    for mine in (layer, plain):
        mine(x.to(mine.weight_hh_l0.device))[0].square().sum().backward()
    for p, q in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad)
    assert len({p.grad.untyped_storage().data_ptr() for p in layer.parameters()}) == 1
    assert len({p.grad.untyped_storage().data_ptr() for p in plain.parameters()}) == 4


def test_sequences_are_packed_by_lengths_on_the_cpu(gpus):
    x = torch.arange(12.0, device="cuda:0").view(2, 3, 2)
    packed = pack_padded_sequence(x, torch.tensor([3, 1]), batch_first=True)
    assert (str(packed.data.device), str(packed.batch_sizes.device)) == ("cuda:0", "cpu")
    out, lengths = pad_packed_sequence(layer_on("cuda:0")(packed)[0], batch_first=True)
    assert (str(out.device), lengths.tolist()) == ("cuda:0", [3, 1])
    assert out[1, 1:].count_nonzero() == 0


def test_layers_of_the_cpu_and_without_cudnn_stay_as_they_are(gpus):
    with torch.backends.cudnn.flags(enabled=False):
        layer_on("cuda:0")
    layer_on("cuda:0", nn.RNN).bfloat16()  # has moved once, in float
    layer_on("cpu").flatten_parameters()
    assert gpus.cudnn.num_flattenings == 1


def test_weights_of_two_devices_are_refused(gpus):
    weights = [torch.zeros(1, device=device) for device in ("cuda:0", "cuda:1")]
    with pytest.raises(RuntimeError, match="cannot flatten"):
        torch._cudnn_rnn_flatten_weight(weights, 2, 1, 2, 1, 0, 1, False, False)


def test_a_tensor_that_gives_its_shape_alone_may_be_elsewhere(gpus):
    for tensor in (torch.ones(2), torch.ones(2, device="cuda:1")):
        assert str(torch.zeros_like(tensor, device="cuda:0").device) == "cuda:0"
        assert torch.empty_like(tensor, device="meta").is_meta
        assert torch.ones_like(tensor, device="cpu").tolist() == [1, 1]
