"""The arithmetic of optimizers is torch's; here numpy, which has jax's functions, runs it."""

import itertools

import numpy as np
import pytest
import torch

from mirror.errors import StrategyError
from mirror_tpu.optimizers import apply_rule, check, flags_of, rule_of, state_on_host

SGDS = [
    {"lr": 0.1, "momentum": m, "dampening": d, "nesterov": n, "weight_decay": w, "maximize": x}
    for m, d, n, w, x in itertools.product(
        (0, 0.9), (0, 0.2), (False, True), (0, 0.1), (False, True)
    )
    if not n or (m and not d)
]
ADAMS = [
    {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-3, "amsgrad": a, "weight_decay": w, "maximize": x}
    for a, w, x in itertools.product((False, True), (0, 0.1), (False, True))
]
CASES = [
    *((torch.optim.SGD, options) for options in SGDS),
    *((kind, options) for kind in (torch.optim.Adam, torch.optim.AdamW) for options in ADAMS),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_steps_are_those_of_torch(kind, options):
    draws = torch.Generator().manual_seed(0)
    start = torch.randn(3, 2, generator=draws)
    plain, own = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    expected, optimizer = kind([plain], **options), kind([own], **options)
    check(optimizer)
    for _ in range(4):
        plain.grad = torch.randn(3, 2, generator=draws)
        expected.step()
        step(optimizer, own, plain.grad)
    torch.testing.assert_close(own, plain, rtol=1e-6, atol=1e-6)
    saved, wanted = optimizer.state_dict()["state"], expected.state_dict()["state"]
    names = {i: {n for n, v in state.items() if v is not None} for i, state in wanted.items()}
    assert {i: set(state) for i, state in saved.items()} == {i: n for i, n in names.items() if n}
    for i, state in saved.items():
        for name, value in state.items():
            torch.testing.assert_close(value, wanted[i][name], rtol=1e-6, atol=1e-6)


def step(optimizer, parameter, grad):
    """Does what a run does for one parameter."""
    rule, (flags,) = rule_of(optimizer), flags_of(optimizer)
    names, state = rule.names(flags), optimizer.state.get(parameter, {})
    first = bool(names) and state.get(names[0]) is None
    numbers = np.array(rule.numbers(optimizer.param_groups[0], state, first))
    held = {name: state_on_host(optimizer, parameter, name).numpy() for name in names}
    value = parameter.detach().numpy()
    value, after = apply_rule(np, rule, flags, value, grad.numpy(), held, numbers)
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(value))
    optimizer.state[parameter].update({n: torch.from_numpy(v) for n, v in after.items()})
    rule.count(optimizer.state[parameter])
    if not optimizer.state[parameter]:
        del optimizer.state[parameter]


class Mine(torch.optim.SGD):
    pass


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.LBFGS, Mine])
def test_other_optimizers_are_refused_by_name(kind):
    optimizer = kind([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(
        StrategyError, match=rf"SGD, Adam and AdamW .* step\(\) of a {kind.__name__};"
    ):
        check(optimizer)


def test_a_step_with_a_graph_is_refused():
    parameter = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(StrategyError, match="differentiable=True"):
        check(torch.optim.SGD([parameter], lr=0.1, differentiable=True))
