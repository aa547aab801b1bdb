"""Compiled modules that return losses: replicas' values join by the weights of uncompiled calls.

The weights come from the graph of the trace, and their numbers from each call.
"""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mirror
from mirror.compiler.runtime.module_program import ModuleProgram
from mirror.replica.exactness.program_terms import ProgramTerms
from mirror.replica.modules.module_owner import interceptor_of
from tests.gpu.compiling import compiling_gpus
from tests.gpu.graphs import graphs_on

SIZES = (7, 7, 7, 8, 7)
OUTSIDE = torch.tensor(0.9)


class Net(nn.Module):
    """Returns a loss of the outputs of a layer; all of a replica's labels may be ignored."""

    def __init__(self, loss):
        super().__init__()
        self.layer, self.loss = nn.Linear(3, 4), loss
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5, 3.0]))

    def forward(self, x, labels):
        return self.loss(self, self.layer(x), labels)


def mean(net, output, labels):
    return output.tanh().mean() / 2 + 1.0


def sum_of_squares(net, output, labels):
    return output.square().sum()


def sum_by_size(net, output, labels):
    return output.square().sum() / len(output)


def cross_entropy(net, output, labels):
    return F.cross_entropy(output, labels)


def weighted_cross_entropy(net, output, labels):
    return F.cross_entropy(output, labels, weight=net.weights) * net.weights[2]


def mean_with_mask(net, output, labels):
    mask = (output.detach() > 0).float()
    return (output * mask).sum() / mask.sum()


def mean_of_chosen(net, output, labels):
    mask = output.detach() <= 0
    return output.masked_fill(~mask, 0.0).sum() / mask.sum()


def loss_and_logits(net, output, labels):
    return {"loss": F.cross_entropy(output, labels), "logits": output, "mean": output.mean()}


def penalized(net, output, labels):
    return F.cross_entropy(output, labels) + 0.1 * net.layer.weight.square().sum()


def penalty_alone(net, output, labels):
    return 0.1 * net.layer.weight.square().sum(), output


def loop(net, output, labels):
    pairs = zip(output, labels.clamp(min=0), strict=True)
    return sum(F.cross_entropy(o[None], label[None]) for o, label in pairs) / len(output)


def mixed_means(net, output, labels):  # no weights join them: warned of, averaged by examples
    return F.cross_entropy(output, labels) + output.mean()


def root_of_mean(net, output, labels):
    return output.square().mean().sqrt()


def with_number_outside(net, output, labels):
    return output.mean() * OUTSIDE


KEPT = [
    *(mean, sum_of_squares, sum_by_size, cross_entropy, weighted_cross_entropy, mean_with_mask),
    *(mean_of_chosen, loss_and_logits, penalized, penalty_alone, loop, mixed_means),
]
ON_GPUS = [cross_entropy, weighted_cross_entropy, mean_with_mask, mean_of_chosen, loss_and_logits]


def batch(size, generator):
    labels = torch.randint(0, 4, (size,), generator=generator)
    labels[: size // 2] = -100  # so replicas have unequal numbers of labels
    return torch.randn(size, 3, generator=generator), labels


def outputs_of(net, x, labels):
    result = net(x, labels)
    if isinstance(result, torch.Tensor):
        return [result]
    return list(result.values() if isinstance(result, dict) else result)


def train(loss, devices, compiles, monkeypatch, in_run=False):
    """Returns what a loop sees, the module, and the number of calls by programs in each step."""
    torch.manual_seed(0)
    strategy = mirror.MirroredStrategy(devices, "naive", schedule="lockstep", verify="off")
    replays, found, run_forward = [], [], ModuleProgram.run_forward

    def count(program, call):
        replays[-1] += 1
        return run_forward(program, call)

    def step(x, labels):
        outputs = outputs_of(net, x, labels)
        loss = outputs[0] / 2
        loss.backward()
        return loss

    with strategy.scope():
        net = Net(loss)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if compiles:
        strategy.compile(net)
    generator = torch.Generator().manual_seed(1)
    batches = [batch(size, generator) for size in SIZES]
    if in_run:
        batches = strategy.distribute_dataset(batches)
    with monkeypatch.context() as patch:
        patch.setattr(ModuleProgram, "run_forward", count)
        for x, labels in batches:
            replays.append(0)
            optimizer.zero_grad()
            if in_run:
                outputs = [strategy.reduce("mean", strategy.run(step, args=(x, labels)))]
            else:
                outputs = outputs_of(net, *[t.to(strategy.devices[0]) for t in (x, labels)])
                outputs[0].backward()
            optimizer.step()
            found += [t.detach().cpu().clone() for t in (*outputs, *net.parameters())]
    return found, net, replays


def check(loss, devices, monkeypatch, **options):
    expected, _, _ = train(loss, devices, False, monkeypatch, **options)
    found, net, replays = train(loss, devices, True, monkeypatch, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    return interceptor_of(net).compiled.num_traces, replays


@pytest.mark.filterwarnings("ignore:.*means over different numbers")
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("loss", KEPT, ids=lambda loss: loss.__name__)
def test_a_loss_by_programs_has_the_bits_of_the_uncompiled_loss(loss, n, monkeypatch, caplog):
    num_traces, replays = check(loss, ["cpu"] * n, monkeypatch)
    assert num_traces == 2
    assert replays[0] == 0
    assert replays[1:3] == [n, n]
    assert replays[4] == n
    assert "uncompiled" not in caplog.text


@pytest.mark.parametrize("loss", [mean, mean_with_mask], ids=lambda loss: loss.__name__)
def test_what_run_reduces_is_read_through_programs(loss, monkeypatch):
    """The same warning is given: a mean over a mask is no mean over examples."""
    told = []
    for compiles in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found, _, replays = train(loss, ["cpu"] * 2, compiles, monkeypatch, in_run=True)
        told.append((torch.cat([t.flatten() for t in found]).tolist(), [*map(str, caught)]))
    assert sum(replays) == 8
    assert told[0][0] == told[1][0]
    assert len(told[0][1]) == len(told[1][1]) == (loss is mean_with_mask)


@pytest.mark.parametrize("loss", ON_GPUS, ids=lambda loss: loss.__name__)
def test_on_gpus_the_numbers_of_weights_come_out_of_the_graphs(loss, monkeypatch):
    with compiling_gpus(2) as gpus, graphs_on(gpus) as graphs:
        check(loss, gpus.devices, monkeypatch)
        assert not gpus.violations
        assert "launch" in [event[0] for event in graphs.events]


@pytest.mark.filterwarnings("ignore:a split call of Net")
@pytest.mark.filterwarnings("ignore:.*function of values that were reduced")
@pytest.mark.parametrize(
    ("loss", "why"),
    [(root_of_mean, "reduced over the examples before"), (with_number_outside, "is no buffer")],
)
def test_a_loss_whose_terms_no_program_keeps_runs_uncompiled(loss, why, monkeypatch, caplog):
    num_traces, replays = check(loss, ["cpu"] * 2, monkeypatch)
    assert num_traces == sum(replays) == 0
    assert caplog.text.count("it returns a 0-d tensor with a gradient") == 1
    assert why in caplog.text


def test_terms_of_another_number_of_examples_are_refused():
    output = nn.Linear(3, 4)(torch.randn(6, 3)).mean()
    terms = ProgramTerms(6, lambda tensor: None)
    terms.add(0, output)
    assert [term.kind for term in terms.of_call((), 0, 6)] == ["mean"]
    (refused,) = terms.of_call((), 0, 3)
    assert "traced for 6 examples on the replica, not 3" in str(refused.error)
    assert terms.of_call((), 1, 6) is None
