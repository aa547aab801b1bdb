"""Optimizers of every kind found in practice, each in the fewest lines."""

import itertools

import torch
from torch import nn

LOG: list[int] = []  # global state of a step


class Plain(torch.optim.Optimizer):
    """The base of most: gradient descent."""

    def __init__(self, params, **defaults):
        super().__init__(params, {"lr": 0.1, **defaults})
        self.begin()

    def begin(self):
        """For subclasses."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(group, p)
        self.end()
        return loss

    def update(self, group, p):
        p.sub_(group["lr"] * p.grad)

    def end(self):
        """For subclasses."""


class CounterOnSelf(Plain):
    def begin(self):
        self.count = 0

    def end(self):
        self.count += 1

    def update(self, group, p):
        p.sub_(p.grad * group["lr"] / (1 + self.count))


class TensorInGroup(Plain):
    def begin(self):
        self.param_groups[0]["step"] = torch.zeros(())

    def update(self, group, p):
        p.sub_(p.grad * group["lr"] / (1 + group["step"]))

    def end(self):
        self.param_groups[0]["step"].add_(1)


class ListsKept(Plain):
    def begin(self):
        self.param_groups[0]["norms"] = []
        self.history = {"sizes": [], "seen": set()}

    def end(self):
        norms = self.param_groups[0]["norms"]
        norms.append(sum(p.grad.square().sum() for p in self.param_groups[0]["params"]).item())
        self.history["sizes"].append(len(norms))
        self.history["seen"].add(len(norms))


class BufferOnSelf(Plain):
    """Momentum in tensors of its own, changed in a way that no version counter sees."""

    def begin(self):
        self.buffers = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]

    def end(self):
        for p, buffer in zip(self.param_groups[0]["params"], self.buffers, strict=True):
            buffer.data.mul_(0.9).add_(p.grad)
            p.sub_(0.1 * buffer)


class FlatBuffer(Plain):
    def begin(self):
        self.params = list(self.param_groups[0]["params"])
        self.flat = torch.zeros(sum(p.numel() for p in self.params))

    def step(self, closure=None):
        with torch.no_grad():
            grads = torch.cat([p.grad.reshape(-1) for p in self.params])
            self.flat.mul_(0.9).add_(grads)
            for p, part in zip(
                self.params, self.flat.split([p.numel() for p in self.params]), strict=True
            ):
                p.add_(part.view_as(p), alpha=-0.1)


class ReplacesData(Plain):
    def update(self, group, p):
        p.data = p.data - group["lr"] * p.grad.data


class NestedModule(Plain):
    def begin(self):
        self.scale = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.scale.weight)

    def update(self, group, p):
        p.sub_(0.1 * p.grad * self.scale.weight.squeeze())

    def end(self):
        self.scale.weight.mul_(0.5)


class OtherKeys(Plain):
    """State under names, and under what is no parameter."""

    def update(self, group, p):
        name = f"parameter {[p is q for q in group['params']].index(True)}"
        buffer = self.state.setdefault(name, torch.zeros_like(p))
        buffer.mul_(0.9).add_(p.grad)
        self.state["total"] = self.state.get("total", 0) + 1
        p.sub_(0.1 * buffer / self.state["total"])


class GlobalState(Plain):
    def end(self):
        LOG.append(len(LOG))

    def update(self, group, p):
        p.sub_(p.grad * group["lr"] / (1 + len(LOG)))


class SetsItsRate(Plain):
    def end(self):
        self.param_groups[0]["lr"] *= 0.7


class EverySecond(Plain):
    """Steps with the sum of two gradients."""

    def begin(self):
        self.calls = itertools.count()
        self.sums = {}

    def step(self, closure=None):
        is_off = next(self.calls) % 2 == 0
        for p in self.param_groups[0]["params"]:
            self.sums[p] = p.grad.clone() + self.sums.pop(p, 0.0)
        if not is_off:
            super().step()

    def update(self, group, p):
        p.sub_(0.1 * self.sums[p])


class Child(torch.optim.SGD):
    """Of torch's class: counts, and is stepped by its parent's code."""

    def __init__(self, params):
        super().__init__(params, lr=0.1, momentum=0.9)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        return super().step(closure)


class RareChild(torch.optim.Adam):
    """Changes what it keeps in its third step only."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.late = []

    def step(self, closure=None):
        result = super().step(closure)
        if self.state[self.param_groups[0]["params"][0]]["step"] == 3:
            self.late.append(3)
            self.param_groups[0]["params"][0].data.mul_(0.5)
        return result


class Lookahead(torch.optim.Optimizer):
    """Wraps, without torch's constructor and so without its hooks."""

    def __init__(self, params):
        self.base = torch.optim.Adam(params, lr=0.1)
        self.param_groups, self.state = self.base.param_groups, self.base.state
        self.defaults = self.base.defaults
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.base.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                slow.add_(p - slow, alpha=0.5)
                p.copy_(slow)
        return loss

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)


class HookedLookahead(Lookahead):
    """The same, with torch's constructor, over the wrapped one's groups."""

    def __init__(self, params):
        params = list(params)
        torch.optim.Optimizer.__init__(self, params, {})
        super().__init__(params)


class Reading(torch.optim.Optimizer):
    """Wraps, and shows groups and state of another by properties."""

    def __init__(self, params):
        self.base = Child(params)
        self.steps = []

    @property
    def param_groups(self):
        return self.base.param_groups

    @property
    def state(self):
        return self.base.state

    def step(self, closure=None):
        self.steps.append(len(self.steps))
        return self.base.step(closure)

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)


class TwoChildren(Plain):
    """Steps two others, one of them only sometimes."""

    def begin(self):
        first, *rest = self.param_groups[0]["params"]
        self.children = [torch.optim.Adam([first], lr=0.1), torch.optim.SGD(rest, lr=0.1)]
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        self.children[0].step()
        if self.count % 2:
            self.children[1].step()


KINDS: list[type] = [
    *Plain.__subclasses__(),
    *[Child, RareChild, Lookahead, HookedLookahead, Reading],
]


class SAM(torch.optim.Optimizer):
    """Evaluates its closure twice, at two points."""

    def __init__(self, params):
        super().__init__(params, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups
        self.evaluations = 0

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        loss = closure()
        params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        scale = 0.05 / torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * scale)
        closure()
        self.evaluations += 2
        for p in params:
            p.data = self.state[p]["old"]
        self.base.step()
        return loss


def lbfgs(params):
    return torch.optim.LBFGS(params, lr=0.3, max_iter=3)


def child(params):
    return Child(params)


def adam(params):
    return torch.optim.Adam(params, lr=0.1)
