"""What programs do with optimizers and with their state, between steps and within them."""

import copy
import io
import pickle
from collections import defaultdict
from functools import partial

import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from tests.programs import catalogue
from tests.programs.catalogue import ON_HOST, Place

# Sharded state has most to do here; eps bounds what rounding of a tiny gradient moves.
program = partial(
    catalogue.program, quick=("run-x3-sharded", "loop-x2-sharded-in-scope"), tolerance=1e-4
)


def batches(count=5):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 6, generator=generator) for size in (10, 11, 7, 6, 8)[:count]]


def adamw(params, **options):
    return torch.optim.AdamW(params, **{"lr": 0.05, "eps": 1e-4, **options})


def sgd(params, **options):
    return torch.optim.SGD(params, **{"lr": 0.1, "momentum": 0.9, **options})


def net(place, seed=0):
    torch.manual_seed(seed)
    return place.put(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))


def train(place, model, optimizer, count=5, *, after=lambda i: None, before=lambda: None):
    """Makes some steps; ``before`` is called before ``optimizer.step()``."""

    def step(x):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        before()
        optimizer.step()

    for i, x in enumerate(batches(count)):
        place.step(step, x)
        after(i)


def states_of(model, *optimizers):
    return [model.state_dict(), *(optimizer.state_dict() for optimizer in optimizers)]


@program
def freezing(place):
    model = net(place)
    optimizer = adamw(model.parameters())

    def toggle(i):
        if i in (0, 2):
            model[0].requires_grad_(i == 2)
        if i == 3:
            model.requires_grad_(False)
            model[2].bias.requires_grad_(True)

    train(place, model, optimizer, after=toggle)
    return states_of(model, optimizer)


@program
def a_group_that_is_added(place):
    model = net(place)
    optimizer = adamw(model[0].parameters())

    def add(i):
        if i == 1:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})

    train(place, model, optimizer, after=add)
    return states_of(model, optimizer)


@program
def parameters_that_are_removed(place):
    model = net(place)
    groups = [{"params": list(layer.parameters())} for layer in (model[0], model[2])]
    optimizer = adamw(groups)

    def remove(i):
        if i == 1:
            optimizer.state.pop(optimizer.param_groups[0]["params"].pop())
        if i == 2:
            for parameter in optimizer.param_groups.pop()["params"]:
                del optimizer.state[parameter]

    train(place, model, optimizer, after=remove)
    return states_of(model, optimizer)


@program
def a_layer_that_is_replaced(place):
    model = net(place)
    optimizer = adamw(model.parameters())

    def replace(i):
        if i == 2:
            model[2] = nn.Linear(5, 3)
            nn.init.constant_(model[2].weight, 0.1)
            nn.init.zeros_(model[2].bias)
            optimizer.param_groups[0]["params"] = list(model.parameters())

    train(place, model, optimizer, after=replace)
    return model.state_dict(), [dict(optimizer.state[p]) for p in model.parameters()]


@program
def state_of_one_device_that_is_loaded(place):
    alone, model = Place(), net(place)
    plain = net(alone)
    on_one, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    train(alone, plain, on_one, 2)
    for _ in range(2):
        optimizer.load_state_dict(copy.deepcopy(on_one.state_dict()))
        train(place, model, optimizer, 3)
    return states_of(model, optimizer)


@program
def a_file_of_torch_save(place):
    model = net(place)
    optimizer = adamw(model.parameters())
    train(place, model, optimizer, 3)
    file = io.BytesIO()
    torch.save(states_of(model, optimizer), file)
    train(place, model, optimizer, 2)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    train(place, model, optimizer, 3)
    return states_of(model, optimizer)


@program
def gradients_that_are_set_to_zeros(place):
    model = net(place)
    optimizer = adamw(model.parameters())
    for i, x in enumerate(batches()):

        def step(x, i=i):
            optimizer.zero_grad(set_to_none=i % 2 == 0)
            (model(x) - 1).square().mean().backward()
            optimizer.step()

        place.step(step, x)
    return states_of(model, optimizer), [p.grad for p in model.parameters()]


@program
def steps_without_gradients(place):
    model = net(place)
    optimizer = adamw(model.parameters())

    def again(i):
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()

    train(place, model, optimizer, after=again)
    return states_of(model, optimizer)


@program
def each_parameter_clipped_by_itself(place):
    model = net(place)
    optimizer = adamw(model.parameters())

    def clip():
        for parameter in model.parameters():
            nn.utils.clip_grad_norm_(parameter, 0.05)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)

    train(place, model, optimizer, before=clip)
    return states_of(model, optimizer)


@program
def averages_of_the_model(place):
    model = net(place)
    optimizer = sgd(model.parameters())
    scheduler = swa_utils.SWALR(optimizer, swa_lr=0.01)
    averaged = [
        swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
        swa_utils.AveragedModel(model, avg_fn=lambda a, b, n: 0.9 * a + 0.1 * b),
        swa_utils.AveragedModel(model, use_buffers=True),
    ]
    shadow = [parameter.detach().clone() for parameter in model.parameters()]

    def average(i):
        for one in averaged:
            one.update_parameters(model)
        for own, parameter in zip(shadow, model.parameters(), strict=True):
            own.lerp_(parameter.detach(), 0.1)
        scheduler.step()

    train(place, model, optimizer, after=average)
    return (
        states_of(model, optimizer),
        shadow,
        [(one.state_dict(), one(batches()[0])) for one in averaged],
    )


@program
def two_optimizers_in_turn(place):
    model = net(place)
    both = adamw(model[0].parameters()), sgd(model[2].parameters())
    for i, x in enumerate(batches()):

        def step(x, i=i):
            model.zero_grad()
            (model(x) - 1).square().mean().backward()
            both[i % 2].step()
            if i == 3:
                both[0].step()

        place.step(step, x)
    return states_of(model, *both)


@program
def a_parameter_in_two_optimizers(place):
    model = net(place)
    optimizer, other = adamw(model.parameters()), sgd(model[2].parameters())
    train(place, model, optimizer, before=other.step)
    return states_of(model, optimizer, other)


@program
def another_optimizer_after_the_first(place):
    model = net(place)
    for make in (adamw, sgd, torch.optim.Adafactor, torch.optim.RMSprop):
        optimizer = make(model.parameters(), lr=0.01)
        train(place, model, optimizer, 2)
    return states_of(model, optimizer)


@program
def an_optimizer_for_each_parameter(place):
    model = net(place)
    optimizers = [sgd([parameter], foreach=False) for parameter in model.parameters()]

    def step(x):
        (model(x) - 1).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    for x in batches():
        place.step(step, x)
    return states_of(model, *optimizers)


@program(apart=ON_HOST)
def copies_that_train_on(place):
    model = net(place)
    optimizer = adamw(model.parameters())
    train(place, model, optimizer, 3)
    results = []
    for copied in (copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))):
        other, own = copied((model, optimizer))
        train(Place(), other, own, 2)
        results.append(states_of(other, own))
    train(place, model, optimizer)
    return states_of(model, optimizer), results


@program
def a_rate_in_a_tensor(place):
    model, rate = net(place), torch.tensor(0.05)
    optimizer = adamw(model.parameters(), lr=rate, foreach=False)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(place, model, optimizer, after=lambda i: scheduler.step())
    return states_of(model, optimizer), rate, optimizer.param_groups[0]["lr"] is rate


@program
def options_of_every_parameter(place):
    model = net(place)
    groups = [
        {"params": [p], "lr": 0.01 * i, "weight_decay": 0.1 * i, "maximize": i == 2}
        for i, p in enumerate(model.parameters(), 1)
    ]
    optimizer = adamw(groups)
    train(place, model, optimizer)
    return states_of(model, optimizer)


@program
def names_of_parameters(place):
    model = net(place)
    optimizer = adamw(model.named_parameters())
    train(place, model, optimizer)
    return states_of(model, optimizer)


@program
def values_that_are_clamped_and_loaded(place):
    model = net(place)
    optimizer, other = adamw(model.parameters()), net(Place(), seed=3).state_dict()

    def change(i):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.3, 0.3)
        if i == 2:
            model.load_state_dict(other)

    train(place, model, optimizer, after=change)
    return states_of(model, optimizer)


@program
def reads_in_inference_mode(place):
    model, outputs = net(place), []
    optimizer = adamw(model.parameters())

    def read(i):
        with torch.inference_mode():
            outputs.append(model(batches()[i]).clone())
            optimizer.state_dict()

    train(place, model, optimizer, after=read)
    return states_of(model, optimizer), outputs


@program
def hooks_of_state_dicts(place):
    model, seen = net(place), []
    optimizer = adamw(model.parameters())
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("before"))
    optimizer.register_state_dict_post_hook(lambda _, state: seen.append(len(state["state"])))
    optimizer.register_load_state_dict_post_hook(
        lambda one: [entry["exp_avg"].zero_() for entry in one.state.values()]
    )

    def load(i):
        if i == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    train(place, model, optimizer, after=load)
    return states_of(model, optimizer), seen


@program
def state_before_the_first_step(place):
    model = net(place)
    optimizer = adamw(model.parameters())
    for p in model.parameters():
        optimizer.state[p].update(
            step=torch.tensor(5.0), exp_avg=torch.ones_like(p), exp_avg_sq=torch.ones_like(p)
        )
    train(place, model, optimizer)
    return states_of(model, optimizer)


@program
def the_state_object_kept(place):
    model = net(place)
    optimizer = adamw(model.parameters())
    train(place, model, optimizer, 1)
    state = optimizer.state
    train(place, model, optimizer, after=lambda i: state[model[0].weight]["exp_avg"].mul_(0.5))
    return states_of(model, optimizer), state is optimizer.state


@program
def sparse_and_dense_parameters(place):
    torch.manual_seed(0)
    model = place.put(nn.Sequential(nn.Embedding(12, 6, sparse=True), nn.Linear(6, 3)))
    optimizer = sgd(model.parameters())

    def step(x):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()

    for i in range(4):
        place.step(step, torch.arange(i, i + 8) % 10)
    return states_of(model, optimizer)


# What programs write into the state after a step; o is the optimizer, w a weight.
WRITES = {
    "values": lambda o, w: o.state[w]["exp_avg"].mul_(0.5),
    "data": lambda o, w: o.state[w]["exp_avg"].data.mul_(0.5),
    "a view": lambda o, w: o.state[w]["exp_avg"][0].fill_(0.5),
    "a key": lambda o, w: o.state[w].update(exp_avg=torch.ones_like(w)),
    "a count": lambda o, w: o.state[w].update(step=torch.tensor(10.0)),
    "an own key": lambda o, w: o.state[w].update(mine=3, own=torch.full_like(w, 3.0)),
    "all values": lambda o, w: [entry["exp_avg_sq"].mul_(1.1) for entry in o.state.values()],
    "all items": lambda o, w: [e.update(exp_avg=e["exp_avg"] * 2) for _, e in o.state.items()],
    "del": lambda o, w: o.state.__delitem__(w),
    "pop": lambda o, w: o.state.pop(w),
    "clear": lambda o, w: o.state.clear(),
    "setdefault": lambda o, w: o.state.setdefault(w, {}).update(exp_avg=torch.zeros_like(w)),
    "another state": lambda o, w: setattr(o, "state", defaultdict(dict)),
    "a note": lambda o, w: o.state.update(note=3),
}

SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.8)],
        milestones=[2],
    ),
}


@program(write=WRITES)
def what_is_written_into_the_state_counts(place, write):
    model = net(place)
    optimizer = adamw(model.parameters())
    weights = (model[0].weight, model[2].bias)
    train(place, model, optimizer, after=lambda i: WRITES[write](optimizer, weights[i % 2]))
    return states_of(model, optimizer)


@program(kind=SCHEDULERS)
def rates_of_a_schedule(place, kind):
    model, rates = net(place), []
    optimizer = sgd([{"params": model[0].parameters()}, {"params": model[2].parameters()}])
    scheduler = SCHEDULERS[kind](optimizer)
    metric = [1.0] if kind == "ReduceLROnPlateau" else []

    def after(i):
        scheduler.step(*metric)
        rates.append([group["lr"] for group in optimizer.param_groups])

    train(place, model, optimizer, after=after)
    return states_of(model, optimizer), rates, scheduler.get_last_lr()
