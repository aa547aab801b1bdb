"""Sparse and complex parameters, containers of parameters, plain tensors, parametrized layers."""

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import parametrize, prune

from tests.programs.catalogue import ON_HOST, SIZES, Net, adam, cross_entropy, program, sgd


@program(ignore="Sparse invariant checks", kind=["SparseAdam", "SGD", "Adagrad"])
def sparse_embeddings(place, kind):
    model = nn.Sequential(nn.EmbeddingBag(11, 6, sparse=True, mode="mean"), nn.Linear(6, 3))
    place.put(model)
    sparse = getattr(torch.optim, kind)(model[0].parameters(), lr=0.1)
    dense = sgd(model[1])

    def step(tokens, y):
        sparse.zero_grad()
        dense.zero_grad()
        loss = cross_entropy(model, tokens, y)
        loss.backward()
        is_sparse = torch.tensor(float(model[0].weight.grad.is_sparse))
        sparse.step()
        dense.step()
        return {"loss": loss.detach(), "is sparse": is_sparse}

    batches = [(torch.randint(11, (n, 4)), torch.randint(3, (n,))) for n in SIZES]
    return [place.step(step, *b) for b in batches], model, sparse, dense


NO_EXAMPLES = {"workers": "torch refuses a batch of no examples there, as a worker has at the end"}


@program(apart=NO_EXAMPLES, tolerance=1e-5, make=[sgd, adam])
def complex_parameters(place, make):
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64))
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=6))

    model = place.put(Spectral())
    optimizer = make(model)
    return place.train(model, optimizer), model, optimizer


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.gains = nn.ParameterList([torch.ones(6), torch.full((6,), 0.5)])
        self.shifts = nn.ParameterDict({"a": torch.zeros(6), "b": nn.Parameter(torch.ones(6))})
        self.heads = nn.ModuleDict({"small": nn.Linear(6, 3), "large": nn.Linear(6, 3)})
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x, name="small"):
        for gain, block in zip(self.gains, self.blocks, strict=False):
            x = torch.tanh(block(x * gain))
        for key, shift in self.shifts.items():
            x = x + shift if key == "a" else x * shift
        return self.heads[name](x + self.gains[-1])


@program
def lists_and_dicts_of_parameters_and_modules(place):
    model = place.put(Containers())
    optimizer = sgd(model)
    losses = place.train(model, optimizer)

    def other(model, x, y):
        return F.cross_entropy(model(x, name="large"), y)

    losses += place.train(model, optimizer, other)
    model.gains.append(nn.Parameter(torch.full((6,), 0.1)))
    model.shifts["c"] = nn.Parameter(torch.full((6,), 0.9))
    model.heads["large"] = nn.Linear(6, 3)
    model.gains[0] = nn.Parameter(torch.full((6,), 0.7))
    optimizer = sgd(model)
    return losses, place.train(model, optimizer, other), model, optimizer


class Reads(nn.Module):
    """Packs its padded input inside forward."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.rnn = nn.GRU(6, 5, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def forward(self, tokens, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        output, hidden = self.rnn(packed)
        output, _ = nn.utils.rnn.pad_packed_sequence(
            output, batch_first=True, total_length=tokens.shape[1]
        )
        return self.head(output.sum(1) + hidden.transpose(0, 1).flatten(1))


@program(apart=NO_EXAMPLES)
def packed_sequences_inside_forward(place):
    model = place.put(Reads())
    optimizer = adam(model)

    def data(sizes):
        for n in sizes:
            lengths = torch.randint(1, 5, (n,))
            tokens = torch.randint(1, 11, (n, 4)) * (torch.arange(4) < lengths[:, None])
            yield tokens, lengths, torch.randint(3, (n,))

    def loss(model, tokens, lengths, y):
        return F.cross_entropy(model(tokens, lengths), y)

    return place.train(model, optimizer, loss, data=data), model, optimizer


@program(apart=ON_HOST)
def a_constant_tensor_kept_as_attribute(place):
    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.mean = torch.arange(6.0)
            self.stats = [torch.full((6,), 2.0)]

        def forward(self, x):
            return super().forward((x - self.mean) / self.stats[0])

    model = place.put(Scaled())
    optimizer = sgd(model)
    losses = place.train(model, optimizer)
    model.mean = torch.ones(6)
    model.stats[0].fill_(3.0)
    return losses, place.train(model, optimizer), model, optimizer


class Counts(Net):
    """Counts its calls, as schedules inside layers do, in a tensor that is no buffer."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.calls = torch.zeros(())

    def forward(self, x):
        if self.training:
            if self.in_place:
                self.calls += 1
            else:
                self.calls = self.calls + 1
        return super().forward(x) * (1 + 0.1 * self.calls)


@program(in_place=[False])
@program(apart={"gpus": "a fault: replicas share what lies on the host"}, in_place=[True])
def a_tensor_attribute_updated_in_forward_is_each_replicas_own(place, in_place):
    model = place.put(Counts(in_place))
    optimizer = sgd(model)
    losses = place.train(model, optimizer)
    return losses, float(model.calls), model, optimizer


@program
def a_buffer_updated_in_forward(place):
    class CountsInBuffer(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.register_buffer("scale", torch.ones(()), persistent=False)

        def forward(self, x):
            if self.training:
                self.calls += 1
                self.scale = self.scale * 1.1
            return super().forward(x) * self.scale + self.calls

    model = place.put(CountsInBuffer())
    optimizer = sgd(model)
    losses = place.train(model, optimizer)
    with torch.no_grad():
        out = model.eval()(torch.ones(5, 6))
    return losses, out, model.scale, model, optimizer


@program(ways=["loop"])
def a_parameter_outside_any_module_learns_in_an_unchanged_loop(place):
    model = place.put(Net())
    temperature = nn.Parameter(torch.tensor(1.5))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1, momentum=0.9)

    def loss(model, x, y):
        return F.cross_entropy(model(x) * temperature, y)

    return place.train(model, optimizer, loss), temperature, model


@program
def reading_grad_of_buffers_and_parameters(place):
    """As gradient loggers and torch's own tracing do."""

    model = place.put(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)))
    return [b.grad for b in model.buffers()], [b.requires_grad for b in model.buffers()]


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).T


class Gain(nn.Module):
    """A parametrization that has a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x * self.gain

    def right_inverse(self, x):
        return x / self.gain


PARAMETRIZATIONS = {
    "custom": lambda m: parametrize.register_parametrization(m, "weight", Symmetric()),
    "custom with parameter": lambda m: parametrize.register_parametrization(m, "weight", Gain()),
    "orthogonal": lambda m: nn.utils.parametrizations.orthogonal(m),
    "weight_norm": lambda m: nn.utils.parametrizations.weight_norm(m),
    "spectral_norm": lambda m: nn.utils.parametrizations.spectral_norm(m),
    "old weight_norm": lambda m: nn.utils.weight_norm(m),
    "old spectral_norm": lambda m: nn.utils.spectral_norm(m),
}


OLD_NAME = ".*weight_norm.*"


@program(ignore=OLD_NAME, when=["before"], kind=PARAMETRIZATIONS)
@program(
    ignore=OLD_NAME,
    apart={"gpus": "spectral norm draws there, other numbers"},
    when=["after"],
    kind=PARAMETRIZATIONS,
)
def parametrized_layers(place, when, kind):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    if when == "after":
        place.put(model)
    PARAMETRIZATIONS[kind](model[0])
    if when == "before":
        place.put(model)
    optimizer = sgd(model)
    losses = place.train(model, optimizer)
    with torch.no_grad():
        model.eval()
        out = model(torch.ones(5, 6))
        model.train()
    losses += place.train(model, optimizer)
    return losses, out, model, optimizer


@program
def a_parameter_made_of_a_mirrored_one_is_mirrored(place):
    model = place.put(Net())
    model.head.weight = nn.Parameter(model.head.weight)
    model.head.bias = nn.Parameter(model.head.bias, requires_grad=False)
    optimizer = sgd(model)
    losses = place.train(model, optimizer)
    return losses, [p.requires_grad for p in model.parameters()], model, optimizer


@program
def a_parametrization_is_removed_and_cached(place):
    model = place.put(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    optimizer = sgd(model)

    def loss(model, x, y):
        with parametrize.cached():
            return F.cross_entropy(model(x) + model(-x), y)

    losses = place.train(model, optimizer, loss)
    weight = model[0].weight
    parametrize.remove_parametrizations(model[0], "weight")
    optimizer = sgd(model)
    return losses, weight, place.train(model, optimizer), model, optimizer


@program
def pruned_layers(place):
    """torch.nn.utils.prune: a mask as buffer, the weight a plain attribute set before forward."""

    model = place.put(Net())
    optimizer = sgd(model)
    losses = place.train(model, optimizer)
    prune.l1_unstructured(model.first, "weight", 0.5)
    optimizer = sgd(model)
    losses += place.train(model, optimizer)
    prune.remove(model.first, "weight")
    return losses, model, optimizer, (model.first.weight == 0).sum().item()
