"""torch.func, export, tracing and summaries of a mirrored model."""

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from tests.oracle import assert_same
from tests.programs.catalogue import ON_HOST, Net, cross_entropy, features, program, sgd


@program(apart={**ON_HOST, "workers": "gradients of plain tensors are each worker's own"})
def functional_call_with_other_parameters(place):
    """The given tensors get the gradients; the model keeps its own parameters."""

    model = place.put(Net())
    given = {k: (p.detach() * 0.5).requires_grad_() for k, p in model.named_parameters()}
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    seen = []

    def step(x, y):
        out = torch.func.functional_call(model, given, (x,))
        return F.cross_entropy(out, y)

    for batch in features():
        loss = place.step(step, *batch)
        grads = torch.autograd.grad(loss, list(given.values()))
        seen.append((loss, grads))
    assert_same(dict(model.named_parameters()), before)
    assert all(type(p) is torch.Tensor for p in given.values())
    return seen, place.train(model, sgd(model)), model


@program(ways=["loop"])
def an_unrolled_update_through_functional_call(place):
    """MAML: one step on the support set, the loss after it differentiated through the step."""

    model = place.put(Net())
    optimizer = sgd(model)

    def step(x, y):
        optimizer.zero_grad()
        names, params = zip(*model.named_parameters(), strict=True)
        grads = torch.autograd.grad(cross_entropy(model, x, y), params, create_graph=True)
        fast = {k: p - 0.1 * g for k, p, g in zip(names, params, grads, strict=True)}
        loss = F.cross_entropy(torch.func.functional_call(model, fast, (-x,)), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return [place.step(step, *b) for b in features()], model, optimizer


@program(ways=["loop"])
def gradients_of_torch_func(place):
    model = place.put(Net())
    params = {k: p.detach() for k, p in model.named_parameters()}
    seen = []
    for x, y in features((5, 2)):

        def loss(params, x, y):
            return F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)

        seen.append(torch.func.grad(loss)(params, x, y))
        seen.append(
            torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(params, x[:, None], y[:, None])
        )
    return seen, place.train(model, sgd(model)), model


@program(apart={"gpus": "the simulated GPUs do not know tensors of vmap"}, ways=["run"])
def per_example_gradients_inside_run(place):
    model = place.put(Net())

    def step(x, y):
        params = {k: p.detach() for k, p in model.named_parameters()}

        def loss(params, x, y):
            return F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)

        grads = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(
            params, x[:, None], y[:, None]
        )
        return {k: g.square().flatten(1).sum(1).mean() for k, g in grads.items()}

    return [place.step(step, *batch) for batch in features()]


@program(apart=ON_HOST)
def summaries_of_the_model_read_as_of_a_plain_one(place):
    model = place.put(Net())
    place.train(model, sgd(model), sizes=(5,))
    return {
        "text": str(model),
        "names": [name for name, _ in model.named_parameters()],
        "modules": [type(m).__name__ for m in model.modules()],
        "count": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "vector": nn.utils.parameters_to_vector(model.parameters()),
        "norm": torch.stack([p.detach().norm() for p in model.parameters()]).norm(),
        "largest": max(p.abs().max().item() for p in model.parameters()),
        "numpy": torch.from_numpy(model.head.bias.detach().numpy().copy()),
        "list": model.head.bias.tolist(),
    }


@program
def a_vector_is_put_into_the_parameters(place):
    model = place.put(Net())
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 0.5, model.parameters())
    optimizer = sgd(model)
    return place.train(model, optimizer), model, optimizer
