"""Autocast, other dtypes and memory formats, and layers changed between steps."""

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from tests.programs.catalogue import SIZES, Net, adam, cross_entropy, features, program, sgd

BF16 = 3e-2


@program(tolerance=BF16, where=["around", "inside", "around, step outside"])
def autocast(place, where):
    model = place.put(Net())
    optimizer = sgd(model, lr=0.05)
    dtypes = []

    def forward(x, y):
        out = model(x)
        return F.cross_entropy(out, y), out.dtype

    def step(x, y):
        optimizer.zero_grad()
        if where == "inside":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss, dtype = forward(x, y)
        else:
            loss, dtype = forward(x, y)
        dtypes.append(str(dtype))
        loss.backward()
        if where != "around, step outside":
            optimizer.step()
        return loss.detach()

    losses = []
    for batch in features():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where != "inside"):
            losses.append(place.step(step, *batch))
        if where == "around, step outside":
            optimizer.step()
    assert set(dtypes) == {"torch.bfloat16"}
    return losses, model, optimizer


@program(tolerance=BF16)
def autocast_can_be_left_inside(place):
    """A layer that must be exact leaves autocast; gradients stay in the parameters' dtype."""

    class Partly(Net):
        def forward(self, x):
            hidden = torch.tanh(self.first(x))
            with torch.autocast("cpu", enabled=False):
                return self.head(hidden.float())

    model = place.put(Partly())
    optimizer = sgd(model, lr=0.05)

    def loss(model, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
            assert out.dtype == torch.float32
            return F.cross_entropy(out, y)

    losses = place.train(model, optimizer, loss)
    return losses, model, optimizer, [str(p.grad.dtype) for p in model.parameters()]


@program(tolerance=BF16)
def autocast_sees_new_weights_after_each_step(place):
    """Its cache of cast weights does not outlive the step."""

    model = place.put(Net())
    optimizer = sgd(model)
    x, y = torch.randn(6, 6), torch.randint(3, (6,))
    outputs = []
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs.append(place.step(lambda x: model(x).float().mean(), x))
        place.train(model, optimizer, data=lambda sizes: [(x, y)])
    return outputs


IN_FLIGHT = {"workers": "a fault: gradients that are on their way keep the dtype of before"}


@program(tolerance=BF16, apart=IN_FLIGHT, convert=["bfloat16"])
@program(tolerance=1e-5, apart=IN_FLIGHT, convert=["double", "to"])
def the_dtype_is_converted_after_mirroring(place, convert):
    dtype = torch.bfloat16 if convert == "bfloat16" else torch.float64

    model = place.put(Net())
    place.train(model, sgd(model, lr=0.01))
    model.to(dtype=dtype) if convert == "to" else getattr(model, convert)()
    optimizer = sgd(model, lr=0.01)
    data = [(x.to(dtype), y) for x, y in features()]
    losses = place.train(model, optimizer, data=lambda sizes: data)
    grads = [str(p.grad.dtype) for p in model.parameters()]
    model.float()
    return losses, grads, place.train(model, sgd(model, lr=0.01)), model, optimizer


@program(tolerance=1e-10)
def a_double_model_is_exact_to_its_own_precision(place):
    model = place.put(Net())
    optimizer = adam(model)
    model.double()
    data = [(x.double(), y) for x, y in features()]
    return place.train(model, optimizer, data=lambda sizes: data), model, optimizer


@program
def channels_last_after_mirroring(place):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
    place.put(model).to(memory_format=torch.channels_last)
    optimizer = sgd(model, lr=0.05)
    data = [(torch.randn(n, 2, 4, 4), torch.randint(3, (n,))) for n in SIZES]
    losses = place.train(model, optimizer, data=lambda sizes: data)
    stays = model[0].weight.is_contiguous(memory_format=torch.channels_last)
    return losses, stays, model, optimizer


@program(how=["module", "parameter"])
def layers_are_frozen_and_thawed_in_mid_training(place, how):
    def freeze(model, frozen):
        if how == "module":
            model.first.requires_grad_(not frozen)
        else:
            for p in model.first.parameters():
                p.requires_grad = not frozen

    model = Net()
    freeze(model, True)
    place.put(model)
    optimizer = sgd(model)
    losses, flags = [], []
    for frozen in (True, False, True, False):
        freeze(model, frozen)
        losses += place.train(model, optimizer, sizes=(5, 2))
        flags.append([(p.requires_grad, p.grad is None) for p in model.parameters()])
    return losses, flags, model, optimizer


@program
def a_frozen_layer_keeps_its_gradient_until_it_is_cleared(place):
    """Frozen after backward: the stale gradient still steps, as on one device."""

    model = place.put(Net())
    optimizer = sgd(model)

    def backward(x, y):
        cross_entropy(model, x, y).backward()

    batches = features()
    place.step(backward, *batches[0])
    model.first.requires_grad_(False)
    place.step(backward, *batches[1])
    optimizer.step()
    grads = [p.grad for p in model.parameters()]
    return model, optimizer, grads


class LoRA(nn.Module):
    """A frozen linear layer with a trained low-rank change."""

    def __init__(self, linear, rank=2):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x):
        return self.linear(x) + x @ self.down.T @ self.up.T


@program
def parameters_added_later_train(place):
    model = place.put(Net())
    optimizer = adam(model)
    losses = place.train(model, optimizer)
    model.first = LoRA(model.first)
    optimizer.add_param_group({"params": [model.first.down, model.first.up], "lr": 0.05})
    losses += place.train(model, optimizer)
    model.scale = nn.Parameter(torch.ones(3))
    model.register_parameter("shift", nn.Parameter(torch.zeros(3)))
    optimizer.add_param_group({"params": [model.scale, model.shift]})

    def scaled(model, x, y):
        return F.cross_entropy(model(x) * model.scale + model.shift, y)

    losses += place.train(model, optimizer, scaled)
    with torch.no_grad():  # merged back into an ordinary layer
        lora = model.first
        lora.linear.weight += lora.up @ lora.down
        model.first = lora.linear
    return losses, place.train(model, optimizer), model, optimizer


@program
def a_head_is_replaced(place):
    model = place.put(Net(classes=5))
    losses = place.train(model, sgd(model))
    model.head = nn.Linear(8, 3)
    optimizer = sgd(model)
    losses += place.train(model, optimizer)
    del model.head.bias
    model.head.register_parameter("bias", None)
    optimizer = sgd(model)
    return losses, place.train(model, optimizer), model, optimizer


@program
def layers_are_inserted_and_removed(place):
    model = place.put(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)))
    losses = place.train(model, sgd(model))
    model.insert(1, nn.Linear(6, 6))
    losses += place.train(model, sgd(model))
    del model[0]
    model[0] = nn.Sequential(model[0], nn.LayerNorm(6))
    model.append(nn.Linear(3, 3))
    optimizer = sgd(model)
    losses += place.train(model, optimizer)
    short = model[:3]  # a new Sequential over the same layers
    return losses, place.train(short, sgd(short)), model, optimizer


@program
def a_parameter_is_replaced_by_a_new_one(place):
    model = place.put(Net())
    losses = place.train(model, sgd(model))
    old = model.head.weight
    model.head.weight = nn.Parameter(old.detach().clone() * 0.5)
    optimizer = sgd(model)
    losses += place.train(model, optimizer)
    return losses, model, optimizer, old


@program
def weights_are_tied_and_untied_after_mirroring(place):
    model = place.put(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
    model[2].weight = model[0].weight
    losses = place.train(model, sgd(model))
    assert model[2].weight is model[0].weight
    model[2].weight = nn.Parameter(model[0].weight.detach().clone())
    optimizer = sgd(model)
    return losses, place.train(model, optimizer), model, optimizer


@program(apart={"gpus": "a GPU draws other numbers"})
def layers_are_initialised_again_after_mirroring(place):
    model = place.put(Net())
    model.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)
    nn.init.orthogonal_(model.first.weight)
    nn.init.constant_(model.head.bias, 0.25)
    optimizer = sgd(model)
    return place.train(model, optimizer), model, optimizer
