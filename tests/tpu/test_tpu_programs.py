"""What triggers a retrace, what branches may return, and the one replica of a traced step."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from mirror.errors import StrategyError, StructureError
from mirror.server.recorded_model import Model
from mirror_tpu.arguments import ProgramOutput, find_widest, make_arguments
from mirror_tpu.programs import tpu_program_key
from mirror_tpu.trace import make_traced_replica

SCALE = 1.0


def key(fn, model=None, optimizers=()):
    return tpu_program_key(
        fn, make_arguments(((), {}), [0], None, 1), model or Model([]), optimizers
    )


def test_globals_and_closures_are_seen(monkeypatch):
    temperature = 1.0

    def step():
        return SCALE * temperature

    first = key(step)
    assert key(step) == first
    temperature = 2.0
    second = key(step)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert len({first, second, key(step)}) == 3


def test_attributes_modes_and_options_are_seen():
    module = nn.Dropout(0.5)
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step():
        return module

    def now():
        return key(step, Model([module, layer]), [optimizer])

    keys = [now()]
    optimizer.param_groups[0]["lr"] = 0.2  # an argument of the program
    assert now() == keys[0]
    module.p = 0.1
    keys.append(now())
    module.eval()
    keys.append(now())
    layer.weight.requires_grad_(False)
    keys.append(now())
    optimizer.param_groups[0]["nesterov"] = True
    keys.append(now())
    with torch.no_grad():
        keys.append(now())
    assert len(set(keys)) == 6


def test_what_is_no_function_has_no_names():
    class Step:
        def __call__(self):
            return 1

    step = Step()
    assert key(step) == key(step)
    assert key(step.__call__) == key(step.__call__)


def test_the_largest_of_all_branches():
    a = ProgramOutput((0, 0), [np.empty((3, 1)), ["x"]])
    b = ProgramOutput((0, 0), [np.empty((2, 4)), ["y"]])
    assert find_widest([a, None, b]) == [((3, 4), np.float64)]


@pytest.mark.parametrize(
    ("other", "rule"),
    [
        (ProgramOutput([0, 0], [np.empty(1), ["x"]]), "different structures"),
        (ProgramOutput((0, 0), [np.empty((1, 1)), ["x"]]), "number of dimensions"),
        (
            ProgramOutput((0, 0), [np.empty(1, "int64"), ["x"]]),
            "a float64 tensor .* a int64 tensor",
        ),
        (ProgramOutput((0, 0), [[5], ["x"]]), "got 5 and a float64 tensor"),
    ],
)
def test_what_does_not_fit_is_refused(other, rule):
    with pytest.raises(StructureError, match=rule):
        find_widest([ProgramOutput((0, 0), [np.empty(1), ["x"]]), other])


strategy = SimpleNamespace(num_replicas_in_sync=3, devices=(torch.device("cpu"),) * 3)


def test_it_knows_how_many_there_are():
    context = make_traced_replica(strategy).context
    assert (context.num_replicas_in_sync, context.strategy) == (3, strategy)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("all_reduce", "strategy.reduce"),
        ("all_gather", "strategy.gather"),
        ("merge_call", "between runs"),
        ("replica_id_in_sync_group", "results of run"),
        ("device", "x.device"),
        ("weight", "weight_of"),
    ],
)
def test_the_rest_is_refused(name, way):
    context = make_traced_replica(strategy).context
    with pytest.raises(StrategyError, match=f"has no {name}; .*{way}"):
        getattr(context, name)
    with pytest.raises(StrategyError, match=f"has no {name}"):
        setattr(context, name, 1)


def test_an_unknown_name_is_none():
    assert not hasattr(make_traced_replica(strategy).context, "all_to_all")
