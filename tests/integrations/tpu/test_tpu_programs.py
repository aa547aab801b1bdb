"""A step is traced anew when a plain value that it reads is another one."""

import torch
from torch import nn

from mirror.integrations.tpu.tpu_arguments import make_arguments
from mirror.integrations.tpu.tpu_programs import tpu_program_key
from mirror.server.recorded_model import Model

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
