"""Keys of kept programs: the same in every process, another one for another anything."""

import platform
import subprocess
import sys

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch.nn import functional as F

import mirror
from mirror.compiler.lowering import program_cache as key_module
from mirror.compiler.lowering.program_cache import program_key
from mirror.compiler.lowering.step_trace import trace_step
from mirror.compiler.runtime.step_arguments import StepArguments
from mirror.compiler.step_inputs import state_tensors
from mirror.compiler.torch_internals import _disabling_mkldnn
from mirror.compiler.varying_inputs import VaryingInputs
from tests.compiler.training import batches, mlp, usual_step


def traced(make_model=mlp, num_replicas=2, size=8, rate=0.1, make_step=usual_step, **options):
    """Returns what the key of the usual step is made of, after one call that is not compiled."""
    torch.manual_seed(0)
    strategy = mirror.MirroredStrategy(["cpu"] * num_replicas)
    with strategy.scope():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), rate, **{"momentum": 0.9, **options})
    step = make_step(model, optimizer)
    (own,) = strategy.distribute_dataset(batches([size]))
    strategy.run(step, own)
    optimizer.zero_grad()
    replicas, registry = strategy._group.replicas, strategy._group.registry
    arguments = StepArguments(own, {}, range(num_replicas))
    leaves = arguments.leaves(arguments.signatures[0])
    found = trace_step(
        step,
        arguments.caller(step),
        leaves,
        arguments.own,
        replicas,
        state_tensors(registry),
        {},
        VaryingInputs(),
    )
    strategy.close()
    return found.graph, found.inputs, found.mode, found.collectives, num_replicas, found.device


def key(**changes):
    return program_key(*traced(**changes))


def smaller():
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 3))


def other_activation():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def frozen():
    model = mlp()
    model[0].weight.requires_grad_(False)
    return model


def scaled_by(number):
    def make_step(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) * number
            loss.backward()
            optimizer.step()
            return loss

        return step

    return make_step


def met_by(op):
    def make_step(model, optimizer):
        usual = usual_step(model, optimizer)

        def step(x, y):
            return mirror.get_replica_context().all_reduce(op, usual(x, y))

        return step

    return make_step


def asking(size):
    def make_step(model, optimizer):
        usual = usual_step(model, optimizer)

        def step(x, y):
            assert x.shape[0] > size
            return usual(x, y)

        return step

    return make_step


# Pairs that differ in one thing.
STEPS = {
    "width": ({}, {"make_model": smaller}),
    "operation": ({}, {"make_model": other_activation}),
    "requires_grad": ({}, {"make_model": frozen}),
    "batch": ({}, {"size": 10}),
    "replicas": ({}, {"num_replicas": 3}),
    "one replica": ({}, {"num_replicas": 1}),
    "momentum": ({}, {"momentum": 0.8}),
    "no state": ({}, {"momentum": 0.0}),
    "number": ({"make_step": scaled_by(2.0)}, {"make_step": scaled_by(2.0 + 2**-51)}),
    "kind of number": ({"make_step": scaled_by(2.0)}, {"make_step": scaled_by(2)}),
    "reduction": ({"make_step": met_by("sum")}, {"make_step": met_by("max")}),
    "guard": ({"make_step": asking(2)}, {"make_step": asking(3)}),
}


@pytest.fixture(scope="module")
def usual():
    return traced()


@pytest.mark.parametrize("name", STEPS)
def test_another_step_has_another_key(name, usual):
    changes, others = STEPS[name]
    first = key(**changes) if changes else program_key(*usual)
    second = key(**others)
    assert first is not None
    assert second is not None
    assert first != second


def test_the_same_step_has_the_same_key_also_where_what_is_an_input_differs(usual):
    assert key() == program_key(*usual)
    assert key(rate=0.3) == program_key(*usual)


def test_another_process_finds_the_same_key(usual):
    program = "from tests.compiler.lowering.test_program_key import key; print(key())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == program_key(*usual)


class _Switch:
    """Sets something of torch, and sets it back."""

    def __init__(self, get, put, value):
        self.get, self.put, self.value = get, put, value

    def __enter__(self):
        self.before = self.get()
        self.put(self.value)

    def __exit__(self, *exception):
        self.put(self.before)


SWITCHES = {
    "dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "device": (lambda: None, torch.set_default_device, "meta"),  # None: no mode is left
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        True,
    ),
    "matmul": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "medium",
    ),
    "inductor": (
        lambda: inductor_config.epilogue_fusion,
        lambda value: setattr(inductor_config, "epilogue_fusion", value),
        False,
    ),
    "inductor of the CPU": (
        lambda: inductor_config.cpp.simdlen,
        lambda value: setattr(inductor_config.cpp, "simdlen", value),
        1,
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_another_setting_is_another_key(name, usual):
    before = program_key(*usual)
    with _Switch(*SWITCHES[name]):
        assert program_key(*usual) not in (None, before)
    assert program_key(*usual) == before


def test_without_mkldnn_it_is_another_key(usual):
    before = program_key(*usual)
    with _disabling_mkldnn():
        assert program_key(*usual) not in (None, before)


@pytest.mark.parametrize("name", ["CXX", "TORCHINDUCTOR_CPP_SIMDLEN", "ATEN_CPU_CAPABILITY"])
def test_another_environment_is_another_key(name, usual, monkeypatch):
    before = program_key(*usual)
    monkeypatch.setenv(name, "other")
    assert program_key(*usual) not in (None, before)


def test_where_it_is_kept_is_not_in_the_key(usual, monkeypatch, tmp_path):
    before = program_key(*usual)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert program_key(*usual) == before


@pytest.fixture
def fresh_makers():
    key_module.makers.cache_clear()
    yield
    key_module.makers.cache_clear()


@pytest.mark.usefixtures("fresh_makers")
@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (torch, "__version__", "3.0"),
        (torch.version, "git_version", "other"),
        (sys, "version", "4.0"),
        (key_module, "_digest_of_sources", lambda folder: "other"),
        (key_module, "_processor", lambda: "other"),
        (platform, "machine", lambda: "other"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "other"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_maker_is_another_key(where, name, value, usual, monkeypatch):
    before = program_key(*usual)
    key_module.makers.cache_clear()
    monkeypatch.setattr(where, name, value)
    assert program_key(*usual) not in (None, before)


def test_the_digest_of_source_code_is_of_names_and_contents(tmp_path):
    def digest():
        return key_module._digest_of_sources(tmp_path)

    (tmp_path / "a.py").write_text("1")
    found = [digest()]
    (tmp_path / "a.py").write_text("2")
    found.append(digest())
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    found.append(digest())
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "c.py").write_text("")
    found.append(digest())
    assert len(set(found)) == 4


def test_the_type_of_an_input_is_in_the_key(usual):
    graph, inputs, *others = usual
    with others[0]:
        changed = [
            (inputs[0].fake, inputs[0].fake.double()),
            (inputs[0].fake, inputs[0].fake.t().contiguous().t()),
            (inputs[0].fake, inputs[0].fake.to(torch.complex64).conj()),
        ]
    keys = {program_key(*usual)}
    for before, after in changed:
        inputs[0].fake = after
        keys.add(program_key(graph, inputs, *others))
        inputs[0].fake = before
    assert len(keys) == 1 + len(changed)
    kind = inputs[0].kind
    inputs[0].kind = mirror.compiler.step_inputs.InputKind.STATE
    keys.add(program_key(graph, inputs, *others))
    inputs[0].kind = kind
    assert len(keys) == 2 + len(changed)


def test_operations_of_others_and_functions_set_in_inductor_have_no_key(usual):
    with torch.library._scoped_library("mirror_test_key", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

        def make_step(model, optimizer):
            usual_one = usual_step(model, optimizer)

            def step(x, y):
                return usual_one(torch.ops.mirror_test_key.twice(x), y)

            return step

        assert key(make_step=make_step) is None
    with inductor_config.patch(_pre_fusion_custom_pass=lambda nodes: nodes):
        assert program_key(*usual) is None
