"""Programs that give parameters and buffers other memory, as people and libraries do: a table.

Each runs on one device and on replicas. ``expected`` says what replicas give: "right", or the
message of the error or warning that names the rule, or the words of the docs that describe it.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.utils as U
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations as P
from torch.nn.utils import parametrize, prune

DOUBLE = torch.float64
NUM_STEPS = 3


@dataclass(frozen=True)
class Raises:
    """A StrategyError (of torch: RuntimeError) with these words; ``ways`` are those that raise."""

    match: str
    ways: tuple[int, ...] = (1, 3)
    kind: str = "StrategyError"


@dataclass(frozen=True)
class Warns:
    """A warning of the logger; ``ways`` are those in which all replicas make the write."""

    match: str
    ways: tuple[int, ...] = (3,)


@dataclass(frozen=True)
class Documented:
    """Words of docs/limits.md."""

    words: str


def net():
    layers = nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)
    return nn.Sequential(*layers).to(DOUBLE)


def momentum(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def mean_loss(model, x, y):
    return F.mse_loss(model(x), y)


@dataclass
class Program:
    """Where a program gives tensors other memory; each function gets the program's ``Trainee``."""

    name: str
    build: Callable[[], nn.Module] = net
    before: Callable[[Any], Any] | None = None  # before strategy.mirror
    scope: Callable[[Any], Any] | None = None  # where the model is made, in a scope
    after: Callable[[Any], Any] | None = None  # after strategy.mirror
    with_optimizer: Callable[[Any], Any] | None = None  # after the optimizer was made
    between: Callable[[Any], Any] | None = None  # between steps
    inside: Callable[[Any], Any] | None = None  # in every replica's step
    at_end: Callable[[Any], Any] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = momentum
    loss: Callable[[Any, Any, Any], torch.Tensor] = mean_loss
    expected: Any = "right"


@dataclass
class Trainee:
    """A model and its optimizer, and what a program keeps."""

    model: Any
    optimizer: Any = None
    step: int = 0
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def params(self):
        return list(self.model.parameters())

    @property
    def linear(self):
        return self.model[3]


def batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 1, 3, 3, generator=generator, dtype=DOUBLE)
    return x, torch.randn(4, 2, generator=generator, dtype=DOUBLE)


def train(program, strategy=None, way=1):
    """Returns losses, values and a last output; of one device without a strategy."""
    x, y = batch()
    torch.manual_seed(7)
    if strategy is not None and program.scope:
        with strategy.scope():
            trainee = Trainee(program.build())
            program.scope(trainee)
    else:
        trainee = Trainee(program.build())
        if program.scope:
            program.scope(trainee)
    if program.before:
        program.before(trainee)
    if strategy is not None:
        strategy.mirror(trainee.model)
    if program.after:
        program.after(trainee)
    trainee.optimizer = program.optimizer(trainee.params)
    if program.with_optimizer:
        program.with_optimizer(trainee)

    def step(x, y):
        if program.inside:
            program.inside(trainee)
        trainee.optimizer.zero_grad()
        loss = program.loss(trainee.model, x, y)
        loss.backward()
        trainee.optimizer.step()
        return loss.detach()

    losses = []
    for trainee.step in range(NUM_STEPS):
        if program.between:
            program.between(trainee)
        if strategy is None or way == 1:
            losses.append(step(x, y))
        else:
            (parts,) = strategy.distribute_dataset([(x, y)])
            losses.append(strategy.reduce("mean", strategy.run(step, args=tuple(parts))))
    if program.at_end:
        program.at_end(trainee)
    values = {name: value.clone() for name, value in trainee.model.state_dict().items()}
    with torch.no_grad():
        output = trainee.model(x).clone()
    return {"losses": torch.stack(losses).to(DOUBLE), "values": values, "output": output}


# What programs do to parameters


def half(p):
    return p.detach().clone() * 0.5


def each(change):
    def change_all(t):
        for p in t.params:
            change(p)

    return change_all


def set_data(p):
    p.data = half(p)


@torch.no_grad()
def set_tensor(p):
    p.set_(half(p))


@torch.no_grad()
def set_storage(p):
    p.set_(half(p).untyped_storage(), 0, p.shape)


@torch.no_grad()
def aten_set(p):
    torch.ops.aten.set_.source_Tensor(p, half(p))


def clone_and_scale(p):
    p.data = p.data.clone()
    p.data.mul_(0.9)


def swap_tensors(p):
    torch.utils.swap_tensors(p, nn.Parameter(half(p)))


def resize_storage(p):
    kept, storage = p.detach().clone(), p.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    p.data.copy_(kept)


def new_parameters(t):
    for module in t.model.modules():
        for name, p in list(module._parameters.items()):
            setattr(module, name, nn.Parameter(half(p)))


def halve_vector(t):
    vector = U.parameters_to_vector(t.model.parameters())
    U.vector_to_parameters(vector.detach() * 0.5, t.model.parameters())


def to_float_and_back(t):
    t.model.float().double()


def channels_last(t):
    t.model.to(memory_format=torch.channels_last)


def alternate_formats(t):
    t.model.to(memory_format=(torch.contiguous_format, torch.channels_last)[t.step % 2])


def conv_channels_last(t):
    U.convert_conv2d_weight_memory_format(t.model, torch.channels_last)


def load(*, assign):
    def load_half(t):
        values = {name: value * 0.5 for name, value in t.model.state_dict().items()}
        t.model.load_state_dict(values, assign=assign)

    return load_half


def on_conversion(how):
    """The conversion with one of torch's settings for it."""
    setter = getattr(torch.__future__, f"set_{how}_module_params_on_conversion")

    def convert(t):
        setter(True)
        try:
            to_float_and_back(t)
        finally:
            setter(False)

    return convert


def to_empty(t):
    values = {name: value.clone() for name, value in t.model.state_dict().items()}
    t.model.to_empty(device="cpu")
    t.model.load_state_dict(values)


def share_memory(t):
    t.model.share_memory()


def of_linear(change):
    return lambda t: change(t.linear)


@torch.no_grad()
def transpose_twice(layer):
    layer.weight.t_()
    layer.weight.t_()


# One flat buffer


def pack(t):
    flat = torch.cat([p.data.reshape(-1) for p in t.params])
    for p, part in zip(t.params, flat.split([p.numel() for p in t.params]), strict=True):
        p.data = part.view_as(p)
    t.kept["flat"] = FLAT[0] = flat


FLAT: list[Any] = [None]  # what was packed before there was a strategy


def scale_flat(t):
    t.kept["flat"].mul_(0.9)


def scale_flat_of_before(t):
    FLAT[0].mul_(0.9)


class FlatSGD(torch.optim.Optimizer):
    """Steps a flat buffer of which the parameters are views."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})
        held = self.param_groups[0]["params"]
        self.sizes = [p.numel() for p in held]
        self.flat = torch.cat([p.data.reshape(-1) for p in held])
        for p, part in zip(held, self.flat.split(self.sizes), strict=True):
            p.data = part.view_as(p)

    @torch.no_grad()
    def step(self, closure=None):
        held = self.param_groups[0]["params"]
        for p, part in zip(held, self.flat.split(self.sizes), strict=True):
            part.sub_(p.grad.reshape(-1), alpha=0.05)


class FlatGradients(FlatSGD):
    """The gradients are views of one flat gradient, which is zeroed in place."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.grads = torch.zeros_like(self.flat)
        self.point()

    def point(self):
        held = self.param_groups[0]["params"]
        for p, part in zip(held, self.grads.split(self.sizes), strict=True):
            p.grad = part.view_as(p)

    def zero_grad(self, set_to_none=False):
        self.grads.zero_()

    @torch.no_grad()
    def step(self, closure=None):
        self.flat.sub_(self.grads, alpha=0.05)


class PointedGradients(FlatGradients):
    """Points the gradients there again before each step."""

    @torch.no_grad()
    def step(self, closure=None):
        held = self.param_groups[0]["params"]
        for p, part in zip(held, self.grads.split(self.sizes), strict=True):
            if p.grad.data_ptr() != part.data_ptr():
                part.copy_(p.grad.reshape(-1))
                p.grad = part.view_as(p)
        super().step()


# Optimizers that replace data


class Replacing(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data = p.data - 0.05 * p.grad


def replace_data(optimizer, *_):
    for p in optimizer.param_groups[0]["params"]:
        p.data = p.data * 0.99


class ReplacingSGD(torch.optim.SGD):
    def step(self, closure=None):
        result = super().step(closure)
        replace_data(self)
        return result


class SettingSGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        result = super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.set_(p.detach() * 0.99)
        return result


class ClampingAdam(torch.optim.Adam):
    def step(self, closure=None):
        result = super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.data = p.data.clamp(-0.3, 0.3)
        return result


class Masters(torch.optim.Optimizer):
    """Steps copies, and gives parameters their data: after each step, or once for all."""

    is_once = False

    def __init__(self, params):
        super().__init__(params, {})
        self.masters = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.inner = torch.optim.SGD(self.masters, lr=0.05)
        self.are_shared = False

    @torch.no_grad()
    def step(self, closure=None):
        held = self.param_groups[0]["params"]
        for p, master in zip(held, self.masters, strict=True):
            master.grad = p.grad.clone()
        self.inner.step()
        for p, master in zip(held, self.masters, strict=True):
            if not (self.is_once and self.are_shared):
                p.data = master.data if not self.is_once else master
        self.are_shared = True


class SharedMasters(Masters):
    is_once = True


def hooked(register):
    def make(params):
        optimizer = momentum(params)
        getattr(optimizer, register)(replace_data)
        return optimizer

    return make


def of(kind, **options):
    return lambda params: kind(params, **options)


# Two parameters in one memory


class Two(nn.Module):
    """Two square layers of one size, and an output."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(9, 9, dtype=DOUBLE), nn.Linear(9, 9, dtype=DOUBLE)
        self.c = nn.Linear(9, 2, dtype=DOUBLE)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x.flatten(1))))))


def tie_object(t):
    t.model.b.weight = t.model.a.weight


def tie_data(t):
    t.model.b.weight.data = t.model.a.weight.data


def tie_transposed(t):
    t.model.b.weight.data = t.model.a.weight.data.t()


def tie_bias(t):
    t.model.b.bias.data = t.model.a.weight.data[3]


def tie_columns(t):
    both = torch.linspace(-1, 1, 162, dtype=DOUBLE).view(9, 18)
    t.model.a.weight.data, t.model.b.weight.data = both[:, :9], both[:, 9:]


def tie_in_part(t):
    long = torch.linspace(-1, 1, 126, dtype=DOUBLE).view(14, 9)
    t.model.a.weight.data, t.model.b.weight.data = long[:9], long[5:]


def tie_other_dtype(t):
    t.model.b.weight.data = t.model.a.weight.data.view(torch.float32).view(-1)[:81].view(9, 9)


def tie_new(read):
    def tie(t):
        t.model.b.weight = nn.Parameter(read(t.model.a.weight))

    return tie


def tie_and_untie(t):
    tie_data(t)
    t.model.b.weight.data = t.model.b.weight.data.clone() * 0.9


def tie_and_move_first(t):
    tie_data(t)
    t.model.a.weight.data = t.model.a.weight.data.clone() * 0.9


def swap_data(t):
    a, b = t.model.a.weight, t.model.b.weight
    a.data, b.data = b.data, a.data


def freeze_second(t):
    tie_data(t)
    t.model.b.weight.requires_grad_(False)


def buffer_of_weight(t):
    t.model.register_buffer("kept", t.model.a.weight.detach())


def use_kept(model, x, y):
    return F.mse_loss(model(x) + x.flatten(1) @ model.kept[:2].t() * 0.1, y)


PARTLY = Raises("shares memory with parameter '.*weight' in part")


# Buffers, and tensors that the program keeps


class Counting(nn.Module):
    """A layer with a buffer that forward writes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(9, 2, dtype=DOUBLE)
        self.register_buffer("code", torch.arange(8, dtype=DOUBLE).view(4, 2))

    def forward(self, x):
        if self.training:
            self.code += 1
        return self.layer(x.flatten(1)) + self.code.mean(0)


class TiedCounts(Counting):
    """Two more buffers in its memory."""

    def __init__(self):
        super().__init__()
        self.register_buffer("flat", self.code.view(-1))
        self.register_buffer("part", self.code[1:3])

    def forward(self, x):
        return super().forward(x) + self.flat.sum() * self.part.mean(0)


def set_part(t):
    t.model.part[0] = -float(t.step)


def replace_flat(t):
    t.model.flat.data = torch.full((8,), 5.0 * t.step, dtype=DOUBLE)


class Constant(Counting):
    def forward(self, x):
        return self.layer(x.flatten(1)) + self.code.mean(0)


def keep(read):
    def keep_it(t):
        t.kept["it"] = read(t)

    return keep_it


def scale_kept(t):
    t.kept["it"][:4] *= 0.7


def scale_kept_code(t):
    t.kept["it"].view(-1)[:3].mul_(0.7)


def through_dlpack(t):
    return torch.from_dlpack(torch.utils.dlpack.to_dlpack(t.linear.weight.detach())).view(-1)


def scale_code_data(t):
    t.model.code.data = t.model.code.data * 0.9


def set_code_data(t):
    t.model.code.data = torch.full((4, 2), 5.0 * t.step, dtype=DOUBLE)


def scale_code_view(t):
    t.model.code.view(-1)[0:3].mul_(0.5)


def scale_state(t):
    t.model.state_dict()["3.weight"].mul_(0.9)


def scale_storage(t):
    torch.empty(0, dtype=DOUBLE).set_(t.linear.weight.untyped_storage()).mul_(0.9)


@torch.no_grad()
def scale_all(t):
    torch._foreach_mul_(t.params, 0.9)


def scale_all_data(t):
    torch._foreach_mul_([p.data for p in t.params], 0.9)


@torch.no_grad()
def lerp_all(t):
    for p in t.params:
        p.lerp_(torch.ones_like(p), 0.1)


def averages(t):
    return t.kept.setdefault("averages", [p.detach().clone() for p in t.params])


def swap_averages(t):
    """What libraries of moving averages do around an evaluation."""
    for average, p in zip(averages(t), t.params, strict=True):
        average.mul_(0.9).add_(p.detach(), alpha=0.1)
    kept = [p.data for p in t.params]
    for average, p in zip(averages(t), t.params, strict=True):
        p.data = average
    t.model(batch()[0])
    for data, p in zip(kept, t.params, strict=True):
        p.data = data


def become_averages(t):
    for average, p in zip(averages(t), t.params, strict=True):
        p.data = average
    for average in averages(t):
        average.mul_(0.95)


def swap_in_run(t):
    kept = [p.data for p in t.params]
    for p in t.params:
        p.data = half(p)
    with torch.no_grad():
        t.model(batch()[0])
    for data, p in zip(kept, t.params, strict=True):
        p.data = data


@torch.no_grad()
def transpose_square(t):
    t.model.a.weight.t_()


class OneFlat(nn.Module):
    """One flat parameter; forward computes with views of it, and may keep them."""

    keeps = False

    def __init__(self):
        super().__init__()
        self.flat = nn.Parameter(torch.linspace(-1, 1, 20, dtype=DOUBLE))

    def forward(self, x):
        weight, bias = self.flat[:18].view(2, 9), self.flat[18:]
        if self.keeps:
            self.weight_view, self.bias_view = weight, bias
        return F.linear(x.flatten(1), weight, bias)


class OneFlatKept(OneFlat):
    keeps = True


# The table


def _at(names, label, change, **options):
    """The same change at several moments."""
    moments = {
        "before": "before",
        "scope": "scope",
        "after": "after",
        "after opt": "with_optimizer",
        "between": "between",
        "inside": "inside",
    }
    return [Program(f"{label}, {n}", **{moments[n]: change}, **options) for n in names]


ALL = ("after", "after opt", "between", "inside")
NO_SWAP = Raises("swap", kind="RuntimeError")
NO_STORAGE = Raises("takes a tensor, not a storage")
NO_NEW_IN_RUN = Raises("was replaced inside strategy.run", ways=(3,))
UNSEEN = Documented("writes that no version counter shows")
IN_RUN = Warns("a tensor that shares the memory of parameter")
FORGET = Raises("was written by a run, and then through a tensor that detach")

PROGRAMS = [
    Program("nothing"),
    *_at(ALL, "p.data = t", each(set_data)),
    *_at(("between",), "p.data = p.data.clone(); p.data.mul_", each(clone_and_scale)),
    *_at(("after", "inside"), "p.set_(t)", each(set_tensor)),
    *_at(("after",), "p.set_(storage)", each(set_storage), expected=NO_STORAGE),
    *_at(ALL, "aten.set_", each(aten_set)),
    *_at(("after",), "swap_tensors", each(swap_tensors), expected=NO_SWAP),
    *_at(("after",), "new parameters", new_parameters),
    *_at(("after", "between", "inside"), "vector_to_parameters", halve_vector),
    *_at(("scope", *ALL), "float().double()", to_float_and_back),
    *_at(("scope", "after"), "to('cpu')", lambda t: t.model.to("cpu", DOUBLE) and None),
    *_at(("after", "after opt"), "swapped in conversion", on_conversion("swap"), expected=NO_SWAP),
    *_at(("after",), "overwritten in conversion", on_conversion("overwrite")),
    *_at(("before", "scope", "after", "after opt", "inside"), "channels_last", channels_last),
    *_at(("between",), "channels_last and back", alternate_formats),
    *_at(("after", "after opt", "inside"), "convert_conv2d_weight", conv_channels_last),
    *_at(("after", "between", "inside"), "load_state_dict", load(assign=False)),
    *_at(("after",), "load_state_dict(assign=True)", load(assign=True)),
    *_at(("inside",), "load_state_dict(assign)", load(assign=True), expected=NO_NEW_IN_RUN),
    *_at(("before", *ALL), "share_memory", share_memory),
    *_at(("after",), "to_empty", to_empty),
    *_at(("after", "inside"), "t_() twice", of_linear(transpose_twice)),
    *_at(("after",), "t_() of a square", transpose_square, build=Two),
    *_at(("after", "inside"), "storage.resize_", each(resize_storage)),
    # one flat buffer
    *_at(("before", "scope", "after", "inside"), "flat", pack),
    Program("flat, before, written", before=pack, between=scale_flat_of_before, expected=UNSEEN),
    Program("flat, after opt, written", with_optimizer=pack, between=scale_flat),
    Program("flat, written inside", with_optimizer=pack, inside=scale_flat, expected=IN_RUN),
    Program("FlatSGD", optimizer=FlatSGD),
    Program("FlatSGD, scope", optimizer=FlatSGD, scope=lambda t: None),
    Program("FlatGradients", optimizer=FlatGradients),
    Program("PointedGradients", optimizer=PointedGradients),
    Program("one flat parameter", build=OneFlat),
    Program("one flat parameter, views kept", build=OneFlatKept),
    # optimizers
    Program("optimizer replaces data", optimizer=Replacing),
    Program("SGD replaces data", optimizer=of(ReplacingSGD, lr=0.05, momentum=0.9)),
    Program("SGD sets data", optimizer=of(SettingSGD, lr=0.05, momentum=0.9)),
    Program("Adam replaces data", optimizer=of(ClampingAdam, lr=0.05)),
    Program("hook before a step", optimizer=hooked("register_step_pre_hook")),
    Program("hook after a step", optimizer=hooked("register_step_post_hook")),
    Program("masters", optimizer=Masters),
    Program("masters shared", optimizer=SharedMasters),
    Program("Adagrad", optimizer=of(torch.optim.Adagrad, lr=0.05)),
    Program("fused Adam", optimizer=of(torch.optim.Adam, lr=0.05, fused=True)),
    Program("fused SGD", optimizer=of(torch.optim.SGD, lr=0.05, fused=True)),
    # two parameters in one memory
    *itertools.chain(
        *(
            _at(("before", "scope", *ALL), label, tie, build=Two)
            for label, tie in (("tied .data", tie_data), ("tied transposed", tie_transposed))
        )
    ),
    *_at(("before", "scope", "after"), "tied object", tie_object, build=Two),
    *_at(("before", "after", "after opt"), "tied to a row", tie_bias, build=Two),
    *_at(("before", "after", "after opt"), "columns of one", tie_columns, build=Two),
    *_at(("before", "after", "after opt"), "tied in part", tie_in_part, build=Two,
         expected=PARTLY),
    *_at(("after",), "tied as another dtype", tie_other_dtype, build=Two, expected=PARTLY),
    *itertools.chain(
        *(
            _at(("before", "scope", "after"), f"nn.Parameter(p{label})", tie_new(read), build=Two)
            for label, read in (
                ("", lambda p: p),
                (".data", lambda p: p.data),
                (".detach()", lambda p: p.detach()),
            )
        )
    ),
    *_at(("after opt",), "tied and untied", tie_and_untie, build=Two),
    *_at(("after opt",), "tied, and the first moves", tie_and_move_first, build=Two),
    *_at(("after opt", "between"), "data swapped", swap_data, build=Two),
    *_at(("after",), "tied and frozen", freeze_second, build=Two),
    *(
        Program(f"tied .data, {kind.__name__} {foreach}", Two, tie_data, optimizer=make)
        for kind, foreach in itertools.product((torch.optim.Adam, torch.optim.SGD), (False, True))
        for make in (of(kind, lr=0.01, foreach=foreach),)
    ),
    # parametrizations
    *itertools.chain(
        *(
            _at(("before", "scope", "after"), label, of_linear(change))
            for label, change in (
                ("weight_norm", P.weight_norm),
                ("old weight_norm", U.weight_norm),
                ("spectral_norm", P.spectral_norm),
                ("old spectral_norm", U.spectral_norm),
                ("orthogonal", P.orthogonal),
                ("prune", lambda layer: prune.l1_unstructured(layer, "weight", 0.3)),
            )
        )
    ),
    Program(
        "parametrization removed",
        before=of_linear(P.weight_norm),
        at_end=of_linear(lambda layer: parametrize.remove_parametrizations(layer, "weight")),
    ),
    Program(
        "pruning removed",
        before=of_linear(lambda layer: prune.l1_unstructured(layer, "weight", 0.3)),
        at_end=of_linear(lambda layer: prune.remove(layer, "weight")),
    ),
    # buffers
    *_at(("before", "scope", "after"), "buffer of a weight", buffer_of_weight, build=Two,
         loss=use_kept),
    Program("tied buffers", build=TiedCounts),
    *_at(("between",), "tied buffers, a part written", set_part, build=TiedCounts),
    *_at(("between",), "tied buffers, one replaced", replace_flat, build=TiedCounts),
    *_at(("between",), "buffer.data scaled", scale_code_data, build=Counting),
    *_at(("between",), "buffer.data replaced", set_code_data, build=Counting),
    *_at(("between",), "buffer's view written", scale_code_view, build=Counting),
    *(
        Program(f"buffer's {name} kept", Counting, with_optimizer=keep(read),
                between=scale_kept_code, expected=expected)
        for name, read, expected in (
            ("view", lambda t: t.model.code.view(-1), "right"),
            ("view of a view", lambda t: t.model.code.t()[:, :2].t(), "right"),
            ("chunk", lambda t: t.model.code.chunk(2)[0], "right"),
            (".data", lambda t: t.model.code.data, "right"),
            ("detach()", lambda t: t.model.code.detach(), FORGET),
            ("state_dict", lambda t: t.model.state_dict()["code"], FORGET),
        )
    ),
    Program("constant buffer's state_dict kept", Constant, between=scale_kept_code,
            with_optimizer=keep(lambda t: t.model.state_dict()["code"])),
    # tensors that are kept, and written between steps
    *(
        Program(f"p{name} kept", with_optimizer=keep(read), between=scale_kept, expected=expected)
        for name, read, expected in (
            (".data", lambda t: t.linear.weight.data.view(-1), "right"),
            (".detach()", lambda t: t.linear.weight.detach().view(-1), "right"),
            (".view().detach()", lambda t: t.linear.weight.view(-1).detach(), "right"),
            (" in state_dict", lambda t: t.model.state_dict()["3.weight"].view(-1), "right"),
            (" as array", lambda t: t.linear.weight.detach().numpy().reshape(-1), UNSEEN),
            (" by DLPack", through_dlpack, UNSEEN),
        )
    ),
    *_at(("between",), "state_dict written", scale_state),
    *_at(("between",), "storage written", scale_storage),
    *_at(("between",), "foreach", scale_all),
    *_at(("between",), "foreach of .data", scale_all_data),
    *_at(("between",), "lerp_", lerp_all),
    *_at(("between",), "averages swapped in and out", swap_averages),
    *_at(("between",), "averages stay in", become_averages),
    *_at(("inside",), "data swapped and back", swap_in_run),
]  # fmt: skip
