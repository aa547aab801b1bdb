"""Every module of PyTorch's own test database, mirrored on two replicas and plain."""

import copy

import pytest
import torch
from torch.testing._internal.common_modules import module_db

import mirror
from tests.oracle import assert_same
from tests.pairs import EXHAUSTIVE, each_once

# Numerics of single layers are PyTorch's own business; some of them warn by the way.
pytestmark = pytest.mark.filterwarnings("ignore")

# Entries without an input that can be split into two and joined again unambiguously.
NOT_SPLIT = {
    "nn.CTCLoss": "its first dimension is time, and the input lengths hold for all of it",
    "nn.GRUCell": "its inputs have no batch dimension",
    "nn.LSTMCell": "its inputs have no batch dimension",
    "nn.MultiheadAttention": "its inputs have no batch dimension",
    "nn.RNNCell": "its inputs have no batch dimension",
}

MODES = ["training", "eval", "no_grad"]
# Of an entry's inputs, spread evenly over them: some entries have hundreds.
MOST_INPUTS = pytest.mark.parametrize("most", [6, pytest.param(40, marks=EXHAUSTIVE)])


@pytest.fixture
def pair(make_strategy):
    return make_strategy(2)


def samples(info, mode, most=6):
    """The entry's inputs, at most so many of them."""
    inputs = info.module_inputs_func(
        info,
        device="cpu",
        dtype=torch.float32,
        requires_grad=mode != "no_grad",
        training=mode == "training",
    )
    inputs = [sample for sample in inputs if sample.forward_input is not None]
    # In odd steps: those with and without a dimension of examples mostly take turns.
    return inputs[:: -(-len(inputs) // most) | 1]


def build(info, sample, mode):
    args, kwargs = fresh(sample.constructor_input)
    kwargs = {  # FractionalMaxPool's samples come as float64 in each dtype
        key: value.float() if getattr(value, "dtype", None) == torch.float64 else value
        for key, value in kwargs.items()
    }
    module = info.module_cls(*args, **kwargs)
    module.train(mode == "training")
    if info.is_lazy:
        with torch.no_grad():
            call(module, fresh(sample.forward_input))
    return module


def tensors(value):
    """Yields the tensors of a nested value, depth first."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from tensors(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from tensors(entry)


def replaced(value, fn):
    """The same structure with ``fn`` of each tensor."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {key: replaced(entry, fn) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(replaced(entry, fn) for entry in value)
    return value


def fresh(inputs):
    """``[args, kwargs]`` with new leaves; one tensor given twice stays one tensor."""
    memo = {}

    def leaf(t):
        if id(t) not in memo:
            memo[id(t)] = t.detach().clone().requires_grad_(t.requires_grad)
        return memo[id(t)]

    return replaced([tuple(inputs.args), dict(inputs.kwargs)], leaf)


def call(module, inputs):
    args, kwargs = inputs
    return module(*args, **kwargs)


def probe(output):
    """A scalar with a different gradient for each element of the output; None if it has none."""
    terms = [
        (t * torch.linspace(0.5, 1.5, t.numel(), device=t.device).view(t.shape)).sum()
        for t in tensors(output)
        if t.requires_grad
    ]
    return sum(terms) if terms else None


def observed(module, inputs):
    """Output, gradients of the parameters, gradients of the inputs."""
    module.zero_grad()
    output = call(module, inputs)
    loss = probe(output)
    if loss is not None:
        loss.backward()
    return (
        replaced(output, torch.Tensor.detach),
        [p.grad for p in module.parameters()],
        [t.grad for t in tensors(inputs)],
    )


def parts_of(inputs, n):
    """The inputs of each replica by api.md's rule, with their sizes; None where it is silent."""
    size = next((t.shape[0] if t.dim() else None for t in tensors(inputs)), None)
    if not size:
        return None

    def select(r):
        return lambda t: torch.tensor_split(t, n)[r] if t.dim() and len(t) == size else t

    sizes = [len(part) for part in torch.tensor_split(torch.zeros(size), n)]
    return [(s, replaced(inputs, select(r))) for r, s in enumerate(sizes) if s]


class Unclear(Exception):
    """Two readings of the rule differ for this output."""


def join(outputs, sizes):
    """What api.md makes of the replicas' outputs; a tuple in PerReplica where it cannot join."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        batched = [o.dim() > 0 and len(o) == s for o, s in zip(outputs, sizes, strict=True)]
        if all(batched):
            if len({o.shape[1:] for o in outputs}) > 1:
                raise Unclear
            return torch.cat(outputs)
        if first.dim() == 0 and first.is_floating_point():
            return sum(o * s for o, s in zip(outputs, sizes, strict=True)) / sum(sizes)
        if any(batched) or len(outputs) == 1:
            raise Unclear
        return mirror.PerReplica(outputs)
    if isinstance(first, dict):
        return {key: join([o[key] for o in outputs], sizes) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(join(list(entries), sizes) for entries in zip(*outputs, strict=True))
    return first


def halves(module, inputs):
    """What the transparent call should give, from the plain module; None if it cannot be told."""
    parts = parts_of(inputs, 2)
    if parts is None:
        return None
    try:
        return join([call(module, part) for _, part in parts], [size for size, _ in parts])
    except Exception:  # the module cannot work on half of these inputs
        return None


def unpacked(value):
    """PerReplica as plain tuples, so that nested values can be compared."""
    if isinstance(value, mirror.PerReplica):
        return tuple(value.values)
    if isinstance(value, dict):
        return {key: unpacked(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(unpacked(entry) for entry in value)
    return value


def matches(actual, expected):
    try:
        assert_same(unpacked(actual), expected)
    except AssertionError:
        return False
    return True


@MOST_INPUTS
@each_once(
    info=[
        pytest.param(info, id=info.name, marks=EXHAUSTIVE if i % 2 else ())
        for i, info in enumerate(module_db)
    ],
    mode=MODES,
)
def test_replicas_that_do_the_same_equal_one_device(info, mode, most, pair):
    """Every replica gets the whole input: the mean of equal gradients is the plain gradient."""
    compared = 0
    for i, sample in enumerate(samples(info, mode, most)):
        plain = build(info, sample, mode)
        module = pair.mirror(copy.deepcopy(plain))
        with torch.set_grad_enabled(mode != "no_grad"):
            expected = observed(plain, fresh(sample.forward_input))
            results = pair.run(lambda m, s: observed(m, fresh(s)), (module, sample.forward_input))
        for r, result in enumerate(pair.local_results(results)):
            assert_same(result, expected, f"sample {i} ({sample.desc}), replica {r}")
        assert_same(module.state_dict(), plain.state_dict(), f"sample {i} ({sample.desc}), state")
        grads = [p.grad for p in module.parameters()]
        assert_same(grads, expected[1], f"sample {i} ({sample.desc}), gradients outside run")
        compared += 1
    assert compared > 0


@MOST_INPUTS
@each_once(
    info=[
        pytest.param(info, id=info.name)
        for info in [i for i in module_db if i.name not in NOT_SPLIT]
    ],
    mode=MODES,
)
def test_a_transparent_call_equals_one_device(info, mode, most, pair):
    """On the whole, or on the parts where examples are not independent (BatchNorm)."""
    compared = 0
    for i, sample in enumerate(samples(info, mode, most)):
        plain = build(info, sample, mode)
        with torch.set_grad_enabled(mode != "no_grad"):
            if halves(copy.deepcopy(plain), fresh(sample.forward_input)) is None:
                continue
            where = f"sample {i} ({sample.desc})"
            module = pair.mirror(copy.deepcopy(plain))
            own, inputs = fresh(sample.forward_input), fresh(sample.forward_input)
            actual = call(module, own)
            expected = call(copy.deepcopy(plain), inputs)
            if not matches(actual, expected):
                expected = halves(plain, inputs)
                assert_same(unpacked(actual), unpacked(expected), where)
            else:
                expected = call(plain, inputs)
            compared += 1
            loss = probe(expected)
            if loss is None:
                continue
            loss.backward()
            probe(actual).backward()
        for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
            assert_same(p.grad, q.grad, f"{where}, gradient of {name}")
        for t, q in zip(tensors(own), tensors(inputs), strict=True):
            assert_same(t.grad, q.grad, f"{where}, gradient of an input")
    assert compared > 0


@pytest.mark.parametrize("name", NOT_SPLIT)
def test_the_entries_left_out_of_the_transparent_call_cannot_be_split(name):
    info = next(info for info in module_db if info.name == name)
    for mode in MODES:
        for sample in samples(info, mode):
            assert halves(build(info, sample, mode), fresh(sample.forward_input)) is None
