"""Mistakes with values that run returns, with reductions, and with collectives."""

import copy
import json
import math
import pickle

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import mirror
from mirror import DivergenceError, StrategyError, StructureError
from tests.mistakes.mistake import (
    X,
    Y,
    check_refusal,
    context,
    each,
    loss_of,
    mirrored,
    net,
    refused,
    step,
    trains_as_plain,
    value_of_three,
)
from tests.toy_models import replica_id

USES = {
    "float": float,
    "int": int,
    "bool": bool,
    "round": round,
    "len": len,
    "list": list,
    "iter": iter,
    "index": lambda v: [1, 2][v],
    "abs": abs,
    "divmod": lambda v: divmod(v, 2),
    "rdivmod": lambda v: divmod(2, v),
    "item": lambda v: v.item(),
    "tolist": lambda v: v.tolist(),
    "numpy": lambda v: v.numpy(),
    "backward": lambda v: v.backward(),
    "mean": lambda v: v.mean(),
    "squeeze": lambda v: v.squeeze(),
    "masked": lambda v: torch.where(v, 0, 1),
    "shape": lambda v: v.shape,
    "device": lambda v: v.device,
    "dtype": lambda v: v.dtype,
    "grad": lambda v: v.grad,
    "add": lambda v: v + 1,
    "radd": lambda v: 1 + v,
    "sum": lambda v: sum([v, v]),
    "iadd": lambda v: _accumulate(v),
    "subtract_tensor": lambda v: v - torch.ones(()),
    "tensor_subtract": lambda v: torch.ones(()) - v,
    "multiply": lambda v: v * v,
    "divide": lambda v: v / 2,
    "divide_tensor": lambda v: torch.ones(1) / v,
    "tensor_add": lambda v: torch.ones(1) + v,
    "negate": lambda v: -v,
    "power": lambda v: v**2,
    "rpower": lambda v: 2**v,
    "matmul": lambda v: v @ v,
    "getitem": lambda v: v[0],
    "setitem": lambda v: v.__setitem__(0, 1.0),
    "in": lambda v: 1.0 in v,
    "less": lambda v: v < 1.0,
    "greater": lambda v: v > 0,
    "at_least": lambda v: v >= 0.5,
    "equal": lambda v: v == 1.0,
    "equal_tensor": lambda v: v == torch.ones(()),
    "unequal": lambda v: v != 1.0,
    "min_of": lambda v: min(v, 3.0),
    "max_best": lambda v: max(0.0, v),
    "if": lambda v: 1 if v else 2,
    "not": lambda v: not v,
    "unpack": lambda v: (lambda first, second: first)(*v),
    "percent": lambda v: "%.2f" % v,  # noqa: UP031
    "math": math.sqrt,
    "isnan": math.isnan,
    "np_array": np.array,
    "np_asarray": np.asarray,
    "np_mean": np.mean,
    "np_mean_of_list": lambda v: np.mean([v, v]),
    "np_float": np.float64,
    "stack": lambda v: torch.stack([v, v]),
    "cat": lambda v: torch.cat([v, v]),
    "tensor": torch.tensor,
    "tensor_of_list": lambda v: torch.tensor([v, v]),
    "as_tensor": torch.as_tensor,
    "torch_add": lambda v: torch.add(v, 1),
    "torch_mean": torch.mean,
    "torch_isnan": torch.isnan,
    "argmax": lambda v: v.argmax(dim=-1),
    "loss_function": lambda v: F.mse_loss(v, v),
    "relu": F.relu,
    "torch_abs": lambda v: torch.abs(v),
    "tensor_fill": lambda v: torch.zeros(2).fill_(v),
    "tensor_assign": lambda v: torch.zeros(2).__setitem__(0, v),
    "module": torch.nn.Linear(1, 1),
}


def _accumulate(value):
    total = torch.zeros(())
    total += value


@pytest.fixture
def losses(strategy):
    return strategy.run(lambda: torch.tensor(1.0 + replica_id()))


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
@refused(TypeError, "strategy.reduce", "strategy.gather", "strategy.local_results", ".detach()")
def test_a_value_of_all_replicas_is_refused_where_one_value_belongs(use, losses):
    use(losses)


@pytest.mark.parametrize("name", ["detach", "clone", "float", "to", "data"])
@refused(TypeError, "strategy.reduce", "strategy.local_results")
def test_a_number_of_all_replicas_is_refused_as_a_tensor(strategy, name):
    value = getattr(strategy.run(lambda: 1.0 + replica_id()), name)
    value("cpu")


def test_a_value_of_all_replicas_is_formatted_part_by_part(losses):
    assert f"{losses:.4f}" == "PerReplica({0: 1.0000, 1: 2.0000})"
    assert "{:.1e}".format(losses) == "PerReplica({0: 1.0e+00, 1: 2.0e+00})"  # noqa: UP032


def test_a_value_of_all_replicas_can_be_printed(losses, capsys):
    print(losses, f"{losses}", str(losses), [losses])
    assert capsys.readouterr().out.count("1: tensor(2.)") == 4


@refused(TypeError, "PerReplica")
def test_a_value_of_all_replicas_is_refused_in_json(losses):
    json.dumps({"loss": losses})


def test_a_value_of_all_replicas_is_hashable_and_equal_to_itself_alone(losses):
    assert losses == losses
    assert {losses: 1}[losses] == 1
    assert losses is not None
    assert losses != "loss"


def test_a_value_of_all_replicas_can_be_pickled(losses):
    assert [v.item() for v in pickle.loads(pickle.dumps(losses)).values] == [1.0, 2.0]


OPS = (ValueError, TypeError)
REDUCTIONS = {
    "an unknown op": (lambda s, v: s.reduce("average", v), ValueError, "sum", "mean", "average"),
    "the op last": (lambda s, v: s.reduce(v, "sum"), OPS, "sum", "mean"),
    "no op": (lambda s, v: s.reduce(v), TypeError, "value"),
    "a function as op": (lambda s, v: s.reduce(torch.mean, v), OPS, "sum"),
    "None as op": (lambda s, v: s.reduce(None, v), OPS, "sum"),
    "an axis of 0-d values": (
        lambda s, v: s.reduce("mean", v, axis=0),
        ValueError,
        "axis 0",
        "()",
    ),
    "a sum of a sum": (
        lambda s, v: s.reduce("sum", s.reduce("sum", v)),
        ValueError,
        "same for all",
    ),
    "no parts": (lambda s, v: s.reduce("max", mirror.PerReplica([])), ValueError, "without parts"),
    "a gather of 0-d values": (lambda s, v: s.gather(v), ValueError, "reduce", "local_results"),
    "a value of more replicas": (
        lambda s, v: s.reduce("sum", value_of_three()),
        *(StructureError, "2 parts", "3"),
    ),
}


@each(REDUCTIONS)
def test_a_mistaken_reduction_is_refused(case, strategy, losses):
    check_refusal(case, strategy, losses)


# What replicas return, and how it is reduced.
RESULTS = {
    "an axis out of range": (
        *(lambda: torch.ones(2), lambda s, v: s.reduce("sum", v, axis=3)),
        *(ValueError, "axis 3"),
    ),
    "different shapes": (
        *(lambda: torch.ones(2 + replica_id()), lambda s, v: s.reduce("mean", v)),
        *(ValueError, "axis", "(2,)", "(3,)"),
    ),
    "no elements": (
        *(lambda: torch.zeros(0), lambda s, v: s.reduce("max", v, axis=0)),
        *(ValueError, "no elements"),
    ),
    "strings": (
        *(lambda: f"replica {replica_id()}", lambda s, v: s.reduce("mean", v)),
        *(TypeError, "tensors or numbers", "str"),
    ),
    "None": (lambda: None, lambda s, v: s.reduce("mean", v), TypeError, "NoneType"),
    "bools": (
        *(lambda: torch.ones(2, dtype=torch.bool), lambda s, v: s.reduce("sum", v)),
        *(TypeError, "bool"),
    ),
    "a gather along the wrong axis": (
        *(lambda: torch.ones(2, 1 + replica_id()), lambda s, v: s.gather(v)),
        *(ValueError, "axis 0", "(2, 1)", "(2, 2)"),
    ),
}


@each(RESULTS)
def test_results_that_cannot_be_reduced_are_refused(case, strategy):
    program, reduction, *refusal = case
    value = strategy.run(program)
    check_refusal((reduction, *refusal), strategy, value)


def test_a_mean_of_what_is_reduced_already_is_itself(strategy, losses):
    assert strategy.reduce("mean", strategy.reduce("mean", losses)).item() == 1.5


ONE = torch.ones(1)
# In every replica; the strategy is the argument.
IN_RUN = {
    "reduce": (lambda s: s.reduce("sum", ONE), StrategyError, "all_reduce"),
    "gather": (lambda s: s.gather(ONE), StrategyError, "all_gather"),
    "all_reduce of bools": (
        *(lambda s: context().all_reduce("sum", torch.tensor(True)), TypeError, "bool"),
    ),
    "all_reduce of text": (lambda s: context().all_reduce("sum", "text"), TypeError, "str"),
    "an unknown op": (lambda s: context().all_reduce("avg", ONE), ValueError, "sum"),
    "the op last": (lambda s: context().all_reduce(ONE, "sum"), OPS, "sum", "mean"),
    "all_gather of 0-d": (lambda s: context().all_gather(ONE[0]), ValueError, "0-d"),
    **{
        f"all_gather along {axis}": (
            lambda s, axis=axis: context().all_gather(torch.ones(2, 3), axis=axis),
            *(ValueError, f"axis {axis} is out of range", "shape (2, 3)"),
        )
        for axis in (-3, 2, 3)
    },
}


@each(IN_RUN)
def test_a_mistake_on_all_replicas_ends_the_run(case, strategy):
    program, *refusal = case
    check_refusal((lambda: strategy.run(program, args=(strategy,)), *refusal))
    assert strategy.run(replica_id).values == (0, 1)


def test_the_result_of_all_reduce_is_no_change_in_place(strategy):
    """Different from torch.distributed."""

    def program():
        value = torch.full((1,), 1.0 + replica_id())
        return value, context().all_reduce("sum", value)

    values, totals = strategy.run(program)
    assert [v.item() for v in values.values] == [1.0, 2.0]
    assert [v.item() for v in totals.values] == [3.0, 3.0]


async def coroutine():
    return 1


def generator():
    yield torch.ones(1)


CALLS = {
    "args no tuple": (lambda s, v: s.run(lambda x: x, args=v), TypeError, "args", "tuple"),
    "a tensor as args": (lambda s, v: s.run(lambda x: x, args=ONE), TypeError, "args", "tuple"),
    "the batch beside args": (lambda s, v: s.run(lambda x, y: x, v, v), TypeError, "args"),
    "a function called": (
        *(lambda s, v: s.run((lambda: ONE)()), TypeError, "the function itself", "args"),
    ),
    "kwargs no dict": (lambda s, v: s.run(len, kwargs=[1]), TypeError, "kwargs", "mapping"),
    "keywords for run": (lambda s, v: s.run(lambda x: x, x=1), TypeError, "keyword"),
    "a batch not unpacked": (
        lambda s, v: s.run(lambda x, y: x, args=((1, 2),)),
        *(TypeError, "missing", "replica 0 of 2"),
    ),
    "a coroutine": (lambda s, v: s.run(coroutine), TypeError, "async"),
    "a generator": (lambda s, v: s.run(generator), TypeError, "generator"),
    "a value of more replicas": (
        lambda s, v: s.run(lambda x: x, args=(value_of_three(),)),
        *(StructureError, "2 parts", "3"),
    ),
    "the rank of torch.distributed": (
        lambda s, v: s.run(lambda: torch.distributed.get_rank() == 0),
        *(ValueError, "init_process_group", "replica_id_in_sync_group"),
    ),
    "a barrier of torch.distributed": (
        lambda s, v: s.run(torch.distributed.barrier),
        *(ValueError, "init_process_group", "get_replica_context"),
    ),
    "the world size of torch.distributed": (
        lambda s, v: s.run(torch.distributed.get_world_size),
        *(ValueError, "init_process_group"),
    ),
}


@each(CALLS)
def test_a_mistaken_call_of_run_is_refused(case, strategy, losses):
    check_refusal(case, strategy, losses)


@refused(ValueError, "init_process_group", "all_reduce", "get_replica_context")
def test_gradients_averaged_by_torch_distributed_are_refused(strategy):
    def program(model, optimizer, x, y):
        loss_of(model, x, y).backward()
        for p in model.parameters():
            torch.distributed.all_reduce(p.grad)

    trains_as_plain(strategy, program)


@refused(DivergenceError, "optimizer.step", "replica 0")
def test_a_step_on_one_replica_alone_is_refused(strategy):
    def program(model, optimizer, x, y):
        loss_of(model, x, y).backward()
        if replica_id() == 0:
            optimizer.step()

    trains_as_plain(strategy, program)


def test_backward_on_one_replica_alone_counts_its_share(strategy):
    """A replica without a loss counts zero: as one device that leaves those examples out."""
    model, _optimizer, batch = mirrored(strategy)

    def program(x, y):
        if replica_id() == 0:
            loss_of(model, x, y).backward()

    strategy.run(program, args=batch)
    expected = net()
    (F.cross_entropy(expected(X[:4]), Y[:4]) / 2).backward()
    assert torch.allclose(model[0].weight.grad, expected[0].weight.grad)


def test_early_stopping_on_a_replicas_own_loss_is_refused(strategy):
    def program(model, optimizer, x, y):
        for _ in range(3):
            loss = step(model, optimizer, x, y)
            if replica_id() == 0 and loss.item() < 100:
                return

    with pytest.raises(DivergenceError, match="replica 0"):
        trains_as_plain(strategy, program)


def repackage(hidden, kinds):
    """Detaches hidden states, as a language model's training loop does between batches."""
    if isinstance(hidden, kinds):
        return hidden.detach()
    return tuple(repackage(h, kinds) for h in hidden)


@pytest.mark.parametrize("kinds", [torch.Tensor, (torch.Tensor, mirror.PerReplica)], ids=str)
def test_hidden_states_of_replicas_are_repackaged_or_the_error_says_how(kinds):
    def train(model):
        hidden = (torch.zeros(1, 4, 2), torch.zeros(1, 4, 2))
        out, hidden = model(torch.ones(4, 3, 3), hidden)
        out.sum().backward()
        hidden = repackage(hidden, kinds)
        return model(torch.ones(4, 3, 3), hidden)[0].detach()

    torch.manual_seed(0)
    plain = torch.nn.LSTM(3, 2, batch_first=True)
    model = mirror.MirroredStrategy(["cpu"] * 2).mirror(copy.deepcopy(plain))
    if kinds is torch.Tensor:
        with pytest.raises(TypeError, match=r"is not a torch\.Tensor.* mirror\.PerReplica"):
            train(model)
    else:
        assert torch.allclose(train(model), train(plain))
