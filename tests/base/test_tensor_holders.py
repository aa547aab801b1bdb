"""TensorHolders: whoever holds a tensor, or its memory, is seen; what nobody holds is free."""

import pytest
import torch
from torch import nn

from mirror.base import torch_private
from mirror.base.tensor_holders import TensorHolders


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, saved):
        ctx.save_for_backward(saved)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def move_to_another(tensor, parameters):
    """Moves a gradient to another parameter, as code with master weights does."""
    other = nn.Parameter(torch.zeros(3))
    other.grad = tensor
    for parameter in parameters:
        parameter.grad = None if parameter.grad is tensor else parameter.grad
    return other


HOLDERS = {
    "object": lambda t, ps: t,
    "list": lambda t, ps: [t],
    "attribute": lambda t, ps: setattr(ps[0], "held", t),
    "closure": lambda t, ps: lambda: t,
    "view": lambda t, ps: t.view(-1),
    "part": lambda t, ps: t[1:],
    "detached": lambda t, ps: t.detach(),
    "data": lambda t, ps: t.data,
    "numpy": lambda t, ps: t.numpy(),
    "numpy of a part": lambda t, ps: t[:1].numpy(),
    "memoryview": lambda t, ps: memoryview(t.numpy()),
    "dlpack": lambda t, ps: t.__dlpack__(),
    "storage": lambda t, ps: t.untyped_storage(),
    "graph": lambda t, ps: Function.apply(torch.ones(3, requires_grad=True), t),
    "another parameter": move_to_another,
    "another tensor": lambda t, ps: torch.empty(0).set_(t),
}


def kept(num=3):
    flat = torch.arange(num * 3.0)
    tensors = [*torch.unsafe_split_with_sizes(flat, [3] * num)]
    parameters = [nn.Parameter(torch.zeros(3)) for _ in tensors]
    return TensorHolders(tensors, [flat]), tensors, parameters


def set_grads(parameters, tensors):
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.grad = tensor


@pytest.mark.parametrize("are_grads", [True, False])
@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.parametrize("how", HOLDERS)
def test_what_a_program_holds_is_not_free_until_it_lets_go(how, which, are_grads):
    holders, tensors, parameters = kept()
    set_grads(parameters, tensors if are_grads else [None] * 3)
    assert holders.are_free(parameters)
    held = HOLDERS[how](tensors[which], parameters)
    assert not holders.are_free(parameters)
    del held
    parameters[0].held = None
    set_grads(parameters, tensors if are_grads else [None] * 3)
    assert holders.are_free(parameters)


def test_gradients_of_some_parameters_only_are_not_free():
    holders, tensors, parameters = kept()
    parameters[1].grad = tensors[1]
    assert not holders.are_free(parameters)


def test_gradients_of_other_parameters_are_not_free():
    holders, tensors, parameters = kept()
    set_grads(parameters, tensors[::-1])
    assert not holders.are_free(parameters)
    assert holders.are_free(parameters[::-1])


def test_a_torch_that_does_not_count_holders_has_no_free_tensors(monkeypatch):
    lacking = torch_private._find("torch.Tensor.none", lambda t: next(torch_private._counted))
    monkeypatch.setattr("mirror.base.tensor_holders.num_holders", lacking)
    holders, _, parameters = kept()
    assert not holders.are_free(parameters)
