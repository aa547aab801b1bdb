"""Recurrent layers on simulated GPUs: cuDNN moves their weights, and they train as one device."""

import copy
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, rnn

import mirror
from tests.gpu.compiling import Training, compiling_gpus
from tests.gpu.cudnn import are_flat
from tests.gpu.fake import FakeGpus
from tests.gpu.programs import split
from tests.multi_worker import both
from tests.oracle import assert_same
from tests.pairs import each_once

STEPS = 3


class Layers(nn.Module):
    """Recurrent layers on sequences of 5 vectors of 4, and a linear layer."""

    def __init__(self, *layers, packs=False, is_flat=False):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        last = getattr(layers[-1], "inner", layers[-1])
        size = (last.proj_size or last.hidden_size) * (1 + last.bidirectional)
        self.out = nn.Linear(size, 2)
        self.packs, self.is_flat, self.is_batch_first = packs, is_flat, last.batch_first

    def forward(self, x):
        x = x if self.is_batch_first else x.transpose(0, 1)
        if self.packs:
            lengths = (x[:, 0, 0] > 0).cpu() * 2 + 1
            x = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        for layer in self.layers:
            if self.is_flat:
                layer.flatten_parameters()
            x, _ = layer(x)
        x = rnn.pad_packed_sequence(x, batch_first=True)[0] if self.packs else x
        return self.out(x.sum(1 if self.is_batch_first else 0))


class Renormalized(nn.GRU):
    """A subclass that says itself what forward and flattening do."""

    def flatten_parameters(self):
        super().flatten_parameters()

    def forward(self, x, h=None):
        y, h = super().forward(x, h)
        return y / (1 + y.norm(dim=-1, keepdim=True)), h


class Computed(nn.Module):
    """Computes a weight in forward, and sets it as an attribute, as the LSTM of AWD-LSTM does."""

    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(4, 3, batch_first=True)
        self.raw = self.inner._parameters.pop("weight_hh_l0")

    def flatten_parameters(self):
        self.inner.flatten_parameters()

    def forward(self, x):
        self.inner.weight_hh_l0 = self.raw * 2.0
        return self.inner(x)


def tied(a, b):
    b.weight_hh_l0 = a.weight_hh_l0
    return Layers(a, b)


def frozen(layer):
    layer.weight_ih_l0.requires_grad_(False)
    return Layers(layer)


def batched(kind, size=4, **options):
    return kind(size, 3, batch_first=True, **options)


LAYERS = {
    "LSTM": lambda: Layers(batched(nn.LSTM)),
    "GRU": lambda: Layers(batched(nn.GRU)),
    "tanh": lambda: Layers(batched(nn.RNN)),
    "relu": lambda: Layers(batched(nn.RNN, nonlinearity="relu")),
    "flat in forward": lambda: Layers(batched(nn.LSTM), is_flat=True),
    "deep": lambda: Layers(batched(nn.GRU, num_layers=2, bidirectional=True)),
    "projected": lambda: Layers(batched(nn.LSTM, proj_size=2)),
    "dropped": lambda: Layers(batched(nn.LSTM, num_layers=2, dropout=1.0)),
    "without bias": lambda: Layers(batched(nn.GRU, bias=False)),
    "packed": lambda: Layers(batched(nn.LSTM), packs=True),
    "second dimension": lambda: Layers(nn.LSTM(4, 3)),
    "subclass": lambda: Layers(batched(Renormalized)),
    "two": lambda: Layers(batched(nn.LSTM), batched(nn.GRU, 3)),
    "frozen": lambda: frozen(batched(nn.LSTM)),
    "tied": lambda: tied(batched(nn.LSTM), batched(nn.LSTM, 3)),
    "weight_norm": lambda: Layers(
        parametrizations.weight_norm(batched(nn.LSTM), "weight_hh_l0"), is_flat=True
    ),
    "computed": lambda: Layers(Computed(), is_flat=True),
}
# Their weights are not in one buffer on one device either, or are moved there in each forward.
NEVER_FLAT = ("tied", "weight_norm", "computed")
WAYS = ("transparent", "forward", "run")
DEVICES = {
    "shared": ["cuda:0", "cuda:0"],
    "distinct": ["cuda:0", "cuda:1"],
    "three": ["cuda:0", "cuda:1", "cuda:0"],
    "cpu": ["cuda:0", "cuda:1"],
    "cuda:1": ["cuda:0", "cuda:1"],
}
PARAMETER_DEVICES = ("cpu", "cuda:1")  # of CentralStorageStrategy, which has no sharded state
NUM_FLATTENED = {"shared": 2, "distinct": 2, "three": 3, "cpu": 2, "cuda:1": 3}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.5, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 0.1),
    "sharded": lambda p: torch.optim.Adam(p, 0.1),
}


def made(name="LSTM"):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.double)
    try:
        return LAYERS[name]()
    finally:
        torch.set_default_dtype(torch.float)


def strategy_of(devices, **options):
    if devices in PARAMETER_DEVICES:
        return mirror.CentralStorageStrategy(DEVICES[devices], devices, backend="naive")
    return mirror.MirroredStrategy(DEVICES[devices], "naive", **options)


def batches(device=None):
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(6, 5, 4, generator=generator, dtype=torch.double)
        y = torch.randn(6, 2, generator=generator, dtype=torch.double)
        yield (x, y) if device is None else (x.to(device), y.to(device))


def train(model, optimizer="SGD", strategy=None, way="transparent", after_step=lambda _: None):
    """Returns the losses of some steps, and the state and gradients after the last."""
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    losses = []

    def forward(x, y):
        return F.mse_loss(model(x), y)

    def step(x, y):
        optimizer.zero_grad()
        loss = forward(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for batch in batches(None if strategy is None else strategy.devices[0]):
        if way == "transparent":
            losses.append(step(*batch).item())
        else:
            parts = split(strategy, batch, strategy.devices)
            optimizer.zero_grad()
            fn = step if way == "run" else forward
            loss = strategy.reduce("mean", strategy.run(fn, args=parts))
            if way == "forward":
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
        after_step(model)
    return losses, model.state_dict(), [p.grad for p in model.parameters()]


def check(layers, devices, way, optimizer):
    # A layer with the batch in the second dimension cannot be called in parts.
    way = "run" if layers == "second dimension" else way
    options = {"optimizer_state": "sharded"} if optimizer == "sharded" else {}
    expected = train(made(layers), optimizer)
    with FakeGpus(2) as gpus:
        with strategy_of(devices, **options) as strategy:
            model = strategy.mirror(made(layers))
            found = train(model, optimizer, strategy, way)
            strategy.check_replicas()
        assert_same(found, expected)
        if layers not in NEVER_FLAT:
            num_layers = 2 if layers == "two" else 1
            assert gpus.cudnn.num_flattenings == num_layers * NUM_FLATTENED[devices]


@each_once(layers=LAYERS, devices=DEVICES, way=WAYS, optimizer=OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:RNN module weights are not part")  # of tied layers
def test_layers_train_as_on_one_device_and_are_flattened_once(layers, devices, way, optimizer):
    check(layers, devices, way, optimizer)


@each_once(devices=DEVICES, way=WAYS, optimizer=OPTIMIZERS)
def test_a_layer_that_forward_flattens_is_flattened_once(devices, way, optimizer):
    check("flat in forward", devices, way, optimizer)


@pytest.mark.parametrize("layers", ["LSTM", "two", "weight_norm"])
def test_one_gpu_flattens_layers_as_a_move_to_it_does(layers):
    expected = train(made(layers))
    with FakeGpus(1) as gpus, mirror.OneDeviceStrategy("cuda:0") as strategy:
        with strategy.scope():
            model = made(layers)
        found = train(model, "SGD", strategy)
        assert_same(found, expected)
        if layers != "weight_norm":
            assert gpus.cudnn.num_flattenings == len(model.layers)


def flattened(model):
    for layer in model.layers:
        layer.flatten_parameters()


def set_weight(model):
    layer = model.layers[0]
    layer.weight_hh_l0 = nn.Parameter(layer.weight_hh_l0.detach() * 0.5)


def set_data(model):
    for p in model.layers.parameters():
        p.data = p.data * 0.5


def loaded(model, **options):
    state = {name: value * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state, **options)


# What is done to a model, and how often that flattens the weights of a replica.
CHANGES = {
    "nothing": (lambda model: None, 0),
    "flattened": (flattened, 0),
    "loaded": (loaded, 0),
    "loaded in place of parameters": (lambda model: loaded(model, assign=True), 1),
    "a new weight": (set_weight, 1),
    "data": (set_data, 0),
    "data, flattened": (lambda model: (set_data(model), flattened(model)), 1),
    "one vector": (
        lambda model: nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(model.layers.parameters()) * 0.5,
            model.layers.parameters(),
        ),
        0,
    ),
    "converted": (lambda model: model.float().double(), 2),
    "moved": (lambda m: m if m.out.weight.device.type == "cpu" else m.to("cuda:0"), 1),
}


@each_once(change=CHANGES, devices=DEVICES, optimizer=OPTIMIZERS, when=["in the scope", "later"])
@pytest.mark.filterwarnings("ignore:RNN module weights are not part")  # of "data"
def test_weights_that_move_again_train_as_on_one_device(change, devices, optimizer, when):
    made_so, num_moves = CHANGES[change]
    is_early = when == "in the scope"
    plain = made()
    if is_early:
        made_so(plain)
    changes = [] if is_early else [made_so]
    expected = train(plain, optimizer, after_step=lambda m: changes.pop()(m) if changes else None)
    options = {"optimizer_state": "sharded"} if optimizer == "sharded" else {}
    with FakeGpus(2) as gpus, strategy_of(devices, **options) as strategy:
        with strategy.scope():
            model = made()
            if is_early:
                made_so(model)
        changes = [] if is_early else [made_so]
        after = lambda m: changes.pop()(m) if changes else None  # noqa: E731
        found = train(model, optimizer, strategy, after_step=after)
        strategy.check_replicas()
        assert_same(found, expected)
        if not is_early:
            assert gpus.cudnn.num_flattenings == (1 + num_moves) * NUM_FLATTENED[devices]
        if change not in ("data", "one vector"):
            layer = model.layers[0]
            assert all(strategy.local_results(strategy.run(lambda: are_flat(layer._flat_weights))))


def test_copies_and_checkpoints_of_a_mirrored_layer_hold_its_weights_alone(tmp_path):
    with FakeGpus(2), strategy_of("distinct") as strategy:
        model = strategy.mirror(made())
        train(model, "SGD", strategy)
        layer, copied = model.layers[0], copy.deepcopy(model.layers[0])
        assert_same(copied.state_dict(), layer.state_dict())
        assert all(w is p for w, p in zip(copied._flat_weights, copied.parameters(), strict=True))
        copied.weight_hh_l0.data.zero_()
        assert layer.weight_hh_l0.count_nonzero() > 0
        replica = layer._replicate_for_data_parallel()
        assert replica._flat_weights is not layer._flat_weights
        state = {name: value.clone() for name, value in model.state_dict().items()}
        checkpoint = mirror.Checkpoint(model=model)
        checkpoint.save(tmp_path / "c")
        loaded(model)
        checkpoint.restore(tmp_path / "c")
        assert_same(model.state_dict(), state)
        strategy.check_replicas()
        strategy.run(lambda: flattened(copy.deepcopy(model)))


@pytest.mark.parametrize("devices", ["shared", "cuda:1"])
def test_memory_that_a_weight_leaves_is_no_longer_known_as_flat(devices):
    """Another tensor may get the address."""
    with FakeGpus(2), strategy_of(devices) as strategy:
        weight = strategy.mirror(made()).layers[0].weight_hh_l0
        leaves = weight._mirrored.leaves
        assert [leaf.flat_at for leaf in leaves] == [leaf.data_ptr() for leaf in leaves]
        weight.data = weight.data.clone()
        assert not any(leaf.flat_at for leaf in leaves)


def train_worker(counts):
    with FakeGpus(1):
        if len(counts) == 1:
            strategy = mirror.MirroredStrategy(["cuda:0"] * counts[0], "naive")
        else:
            own = counts[int(os.environ["RANK"])]
            strategy = mirror.MultiWorkerMirroredStrategy(["cuda:0"] * own, backend="naive")
        with strategy:
            model = strategy.mirror(made())
            optimizer = OPTIMIZERS["SGD"](model.parameters())

            def step(x, y):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()

            for parts in strategy.distribute_dataset(list(batches())):
                strategy.run(step, args=parts)
            state = {name: value.cpu() for name, value in model.state_dict().items()}
            return [state] * counts[0]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.GRU(8, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x):
        self.layer.flatten_parameters()
        return self.out(self.layer(x[:, None].expand(-1, 3, -1))[0][:, -1])


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["shared", "distinct"])
def test_a_compiled_step_leaves_weights_where_they_are(devices):
    options = {"mode": "trace", "make_model": Tagger}
    on_cpu = Training(["cpu", "cpu"], **options)
    losses, expected = on_cpu.train([16, 16, 15, 16])
    on_cpu.close()
    with compiling_gpus(2) as gpus:
        training = Training(DEVICES[devices], **options)
        found, state = training.train([16, 16, 15, 16])
        training.close()
        assert gpus.cudnn.num_flattenings == 2
    assert_same([found, state], [losses, expected])


@pytest.mark.slow
def test_several_workers_train_as_one(worker_pool):
    found, expected = both(worker_pool, train_worker, (2, 1))
    assert_same(found[0], expected[0], tolerance=1e-10)
