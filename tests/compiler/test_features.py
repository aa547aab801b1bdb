"""A catalogue of common training steps: equal to one device, or refused with a line."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mirror
from tests.compiler.training import Beside, batches, linear, mlp
from tests.pairs import each_once, quick_of

SIZES = [8, 8, 7, 8, 3, 8]
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01, decoupled_weight_decay=True),
    "radam": lambda p: torch.optim.RAdam(p, 0.01),
    "adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, 1.0),
    "asgd": lambda p: torch.optim.ASGD(p, 0.1),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "muon": lambda p: torch.optim.Muon([one for one in p if one.dim() == 2], 0.01),
    "rates": lambda p: torch.optim.SGD(p, torch.tensor(0.1), momentum=0.9),
}


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(2, 5, batch_first=True, **options)
        self.head = nn.Linear(5 * (1 + self.layer.bidirectional), 3)

    def forward(self, x):
        return self.head(self.layer(x.reshape(-1, 3, 2))[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(1, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.encoder(self.embedding(x.unsqueeze(-1))).mean(1))


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False))


def tied():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    return model


def normalized(kind):
    return lambda: nn.Sequential(nn.Linear(6, 8), kind(8), nn.ReLU(), nn.Linear(8, 3))


MODELS = {
    "lstm": lambda: Recurrent(nn.LSTM),
    "lstm both ways": lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    # Dropout of everything between the layers: the same in every draw.
    "lstm, dropped": lambda: Recurrent(nn.LSTM, num_layers=2, dropout=1.0, bidirectional=True),
    "gru, dropped": lambda: Recurrent(nn.GRU, num_layers=3, dropout=1.0, bias=False),
    "rnn, dropped": lambda: Recurrent(nn.RNN, num_layers=2, dropout=1.0, nonlinearity="relu"),
    "attention": Attention,
    "checkpoint": Recomputed,
    "tied": tied,
    "layer norm": normalized(nn.LayerNorm),
    "our batch norm": normalized(mirror.nn.SyncBatchNorm),
    "torch's batch norm": normalized(nn.SyncBatchNorm),
    "spectral norm": lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", quick_of(OPTIMIZERS, ["fused", "muon", "rates", "sgd"]))
def test_optimizers(name):
    Beside(3, linear, OPTIMIZERS[name]).train(batches(SIZES), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", quick_of(MODELS, [name for name in MODELS if name not in ("lstm", "gru", "rnn")])
)
def test_models(name):
    beside = Beside(2, MODELS[name])
    beside.train(batches([s for s in SIZES if s > 4]), rtol=1e-4, atol=1e-5)
    assert beside.compiled.num_traces == 1


class WrittenBuffers(nn.Module):
    """Buffers that each call writes without reading the batch, in place or as a new tensor."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("factor", torch.ones(3))

    def forward(self, x):
        if self.training:
            self.count += 1
            self.factor = self.factor * 0.9 + 0.2
        return self.head(x) * self.factor + self.count


class InDouble(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body.double()

    def forward(self, x):
        return self.body(x.double())


BUFFERS = {
    "written": WrittenBuffers,
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)),
}


@each_once(name=BUFFERS, num_replicas=[1, 2, 3])
def test_replicas_that_were_idle_have_the_buffers_of_the_others(name, num_replicas):
    beside = Beside(num_replicas, lambda: InDouble(BUFFERS[name]()))
    sizes = [1, 1, 1, 1, 2, 2, 1, 1, 3, 2, 2, 3]
    beside.train(batches(sizes), rtol=1e-10, atol=1e-10)
    assert beside.compiled.num_traces
    for key, value in beside.plain.state_dict().items():
        torch.testing.assert_close(beside.model.state_dict()[key], value, rtol=1e-10, atol=1e-10)


# Steps: each is made of a model and its optimizer


def clipped(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        return loss

    return step


def twice(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        second = F.cross_entropy(model(2 * x), y)
        second.backward()
        optimizer.step()
        return loss + second

    return step


def by_hand(model, optimizer):
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.clamp_(-0.3, 0.3)
                parameter.grad = None
        return loss

    return step


def penalized(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        x = x.detach().requires_grad_()
        outputs = model(x)
        (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        loss = F.cross_entropy(outputs, y) + slope.square().sum(1).mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def of_functions(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        weights = dict(model.named_parameters())
        outputs = torch.func.functional_call(model, weights, (x,))
        inputs = outputs[:, :1].expand(-1, model[-1].in_features)
        slopes = torch.func.vmap(torch.func.grad(lambda v: model[-1](v).sin().sum()))(inputs)
        loss = F.cross_entropy(outputs, y) + slopes.square().sum(1).mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def sizes_returned(model, optimizer):
    usual = clipped(model, optimizer)

    def step(x, y):
        return usual(x, y) * len(x) / x.shape[0]

    return step


STEPS = [clipped, twice, by_hand, penalized, of_functions, sizes_returned]


@pytest.mark.slow
@pytest.mark.parametrize("make_step", STEPS)
def test_steps(make_step):
    Beside(2, mlp, make_step=make_step).train(batches(SIZES), rtol=1e-4, atol=1e-5)


def test_numbers_that_depend_on_sizes_are_those_of_every_call():
    def make_step(model, optimizer):
        usual = clipped(model, optimizer)

        def step(x, y):
            usual(x, y)
            return {"examples": x.shape[0], "name": "step", "nothing": None}

        return step

    beside = Beside(2, linear, make_step=make_step)
    for own in beside.strategy.distribute_dataset(batches([8, 8, 7, 5])):
        sizes = [len(part) for part in own[0].values]
        found = beside.compiled(*own)
        assert list(found["examples"].values) == sizes
        assert found["name"] == "step"
        assert found["nothing"] is None
    assert beside.compiled.num_traces == 1


def test_two_models_of_which_the_second_sees_the_firsts_new_parameters():
    torch.manual_seed(0)
    strategy = mirror.MirroredStrategy(["cpu"] * 2)

    def make():
        torch.manual_seed(0)
        maker, critic = nn.Linear(6, 6), nn.Linear(6, 1)
        of_maker = torch.optim.Adam(maker.parameters(), 0.01)
        of_critic = torch.optim.Adam(critic.parameters(), 0.01)

        def step(x):
            of_critic.zero_grad()
            made = maker(x)
            loss = F.softplus(-critic(x)).mean() + F.softplus(critic(made.detach())).mean()
            loss.backward()
            of_critic.step()
            of_maker.zero_grad()
            second = F.softplus(-critic(made)).mean()
            second.backward()
            of_maker.step()
            return loss, second

        return step, [*maker.parameters(), *critic.parameters()]

    plain, expected = make()
    with strategy.scope():
        step, parameters = make()
    compiled = strategy.compile(step, mode="trace")
    data = [x for x, _ in batches([8, 8, 7])]
    for x, own in zip(data, strategy.distribute_dataset(data), strict=True):
        plain(x)
        compiled(own)
        for mine, theirs in zip(parameters, expected, strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-4, atol=1e-6)
    assert compiled.num_traces == 1


@pytest.mark.slow
def test_inductors_dropout_draws_anew_and_by_the_seed():
    def run():
        torch.manual_seed(0)
        strategy = mirror.MirroredStrategy(["cpu"] * 2)
        with strategy.scope():
            model = nn.Sequential(nn.Linear(6, 400), nn.Dropout(0.5))
            nn.init.ones_(model[0].bias)
            nn.init.zeros_(model[0].weight)
            optimizer = torch.optim.SGD(model.parameters(), 0.0)

        def step(x, y):
            optimizer.zero_grad()
            outputs = model(x)
            outputs.mean().backward()
            optimizer.step()
            return outputs

        compiled = strategy.compile(step, mode="inductor")
        loader = strategy.distribute_dataset(batches([8, 8, 8]))
        return [strategy.local_results(compiled(*own)) for own in loader]

    found = run()
    for parts in found:
        for part in parts:
            assert set(part.unique().tolist()) == {0.0, 2.0}
            assert abs(part.mean() - 1) < 0.15
    assert not torch.equal(found[1][0], found[1][1])
    assert not torch.equal(found[1][0], found[2][0])
    again = run()
    assert all(map(torch.equal, found[2], again[2]))


class MaxNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4, max_norm=1.0), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.embedding((3 * x.abs()).long().clamp(max=8)).mean(1))


NO_MOMENTUM = r"BatchNorm(1d)?\(momentum=None\) divides.*set momentum to a number"
REFUSED = {
    "max_norm": (MaxNorm, None, "leave max_norm out"),
    "batch norm": (normalized(lambda n: nn.BatchNorm1d(n, momentum=None)), None, NO_MOMENTUM),
    "sync": (normalized(lambda n: nn.SyncBatchNorm(n, momentum=None)), None, NO_MOMENTUM),
    "adafactor": (
        linear,
        lambda p: torch.optim.Adafactor(p, 0.1),
        "Adafactor.step decides by norms.*use another optimizer",
    ),
}


@each_once(name=REFUSED, num_replicas=[2, 3])
def test_layers_and_optimizers_that_ask_for_values_are_refused(name, num_replicas):
    make_model, make_optimizer, remedy = REFUSED[name]
    beside = Beside(num_replicas, make_model, make_optimizer)
    first, second = beside.strategy.distribute_dataset(batches([8, 8]))
    beside.compiled(*first)
    with pytest.raises(mirror.errors.CompileError, match=f"{remedy}.* fallback='eager'"):
        beside.compiled(*second)
