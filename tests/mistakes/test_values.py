"""Mistakes with values that run returns, with reductions, and with collectives."""

import json
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import mirror
from mirror import DivergenceError, StructureError
from tests.mistakes.mistake import (
    X,
    Y,
    loss_of,
    mirrored,
    net,
    refused,
    step,
    trains_as_plain,
)
from tests.toy_models import replica_id

ASKED = {
    "float": float,
    "int": int,
    "bool": bool,
    "round": round,
    "len": len,
    "list": list,
    "iter": iter,
    "index": lambda v: [1, 2][v],
    "abs": abs,
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
    "divide": lambda v: v / 2,
    "divide_tensor": lambda v: torch.ones(1) / v,
    "tensor_add": lambda v: torch.ones(1) + v,
    "negate": lambda v: -v,
    "power": lambda v: v**2,
    "matmul": lambda v: v @ v,
    "getitem": lambda v: v[0],
    "setitem": lambda v: v.__setitem__(0, 1.0),
    "in": lambda v: 1.0 in v,
    "less": lambda v: v < 1.0,
    "at_least": lambda v: v >= 0.5,
    "equal": lambda v: v == 1.0,
    "equal_tensor": lambda v: v == torch.ones(()),
    "unequal": lambda v: v != 1.0,
    "min_of": lambda v: min(v, 3.0),
    "max_best": lambda v: max(0.0, v),
    "if": lambda v: 1 if v else 2,
    "not": lambda v: not v,
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
    "torch_mean": torch.mean,
    "torch_isnan": torch.isnan,
    "argmax": lambda v: v.argmax(dim=-1),
    "loss_function": lambda v: torch.nn.functional.mse_loss(v, v),
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


@pytest.mark.parametrize("use", ASKED.values(), ids=ASKED.keys())
@refused(TypeError, "strategy.reduce", "strategy.gather", "strategy.local_results", ".detach()")
def test_a_value_of_all_replicas_used_as_one(use, losses):
    use(losses)


@pytest.mark.parametrize("name", ["detach", "clone", "float", "to", "data"])
@refused(TypeError, "strategy.reduce", "strategy.local_results")
def test_a_number_of_all_replicas_used_as_a_tensor(strategy, name):
    value = getattr(strategy.run(lambda: 1.0 + replica_id()), name)
    value("cpu")


def test_a_value_of_all_replicas_is_formatted_part_by_part(losses):
    assert f"{losses:.4f}" == "PerReplica({0: 1.0000, 1: 2.0000})"
    assert "{:.1e}".format(losses) == "PerReplica({0: 1.0e+00, 1: 2.0e+00})"  # noqa: UP032


def test_a_value_of_all_replicas_can_be_printed(losses, capsys):
    print(losses, f"{losses}", str(losses), [losses])
    assert capsys.readouterr().out.count("1: tensor(2.)") == 4


@refused(TypeError, "PerReplica")
def test_a_value_of_all_replicas_in_json(losses):
    json.dumps({"loss": losses})


def test_a_value_of_all_replicas_is_hashable_and_equal_to_itself(losses):
    assert losses == losses
    assert {losses: 1}[losses] == 1
    assert losses is not None


def test_a_value_of_all_replicas_pickled(losses):
    assert [v.item() for v in pickle.loads(pickle.dumps(losses)).values] == [1.0, 2.0]


@refused(TypeError, "local_results")
def test_unpacking_the_parts(losses):
    _first, _second = losses


@refused(ValueError, "sum", "mean", "average")
def test_an_unknown_op(strategy, losses):
    strategy.reduce("average", losses)


@refused((ValueError, TypeError), "sum", "mean")
def test_the_op_after_the_value(strategy, losses):
    strategy.reduce(losses, "sum")


@refused(TypeError, "value")
def test_the_op_left_out(strategy, losses):
    strategy.reduce(losses)


@refused((ValueError, TypeError), "sum")
def test_a_function_as_the_op(strategy, losses):
    strategy.reduce(torch.mean, losses)


@refused((ValueError, TypeError), "sum")
def test_none_as_the_op(strategy, losses):
    strategy.reduce(None, losses)


@refused(ValueError, "axis 0", "()")
def test_an_axis_of_0d_values(strategy, losses):
    strategy.reduce("mean", losses, axis=0)


@refused(ValueError, "axis 3")
def test_an_axis_out_of_range(strategy):
    strategy.reduce("sum", strategy.run(lambda: torch.ones(2)), axis=3)


@refused(ValueError, "axis", "(2,)", "(3,)")
def test_reducing_unlike_shapes(strategy):
    strategy.reduce("mean", strategy.run(lambda: torch.ones(2 + replica_id())))


@refused(ValueError, "same for all")
def test_a_sum_of_what_is_reduced_already(strategy, losses):
    strategy.reduce("sum", strategy.reduce("sum", losses))


def test_a_mean_of_what_is_reduced_already(strategy, losses):
    assert strategy.reduce("mean", strategy.reduce("mean", losses)).item() == 1.5


@refused(TypeError, "tensors or numbers", "str")
def test_reducing_strings(strategy):
    strategy.reduce("mean", strategy.run(lambda: f"replica {replica_id()}"))


@refused(TypeError, "NoneType")
def test_reducing_none(strategy):
    strategy.reduce("mean", strategy.run(lambda: None))


@refused(TypeError, "bool")
def test_reducing_bools(strategy):
    strategy.reduce("sum", strategy.run(lambda: torch.ones(2, dtype=torch.bool)))


@refused(ValueError, "reduce", "local_results")
def test_gathering_0d_values(strategy, losses):
    strategy.gather(losses)


@refused(ValueError, "axis 0", "(2, 1)", "(2, 2)")
def test_gathering_along_the_wrong_axis(strategy):
    strategy.gather(strategy.run(lambda: torch.ones(2, 1 + replica_id())))


@refused(mirror.StrategyError, "all_reduce")
def test_reduce_inside_run(strategy):
    strategy.run(lambda: strategy.reduce("sum", torch.ones(1)))


@refused(mirror.StrategyError, "all_gather")
def test_gather_inside_run(strategy):
    strategy.run(lambda: strategy.gather(torch.ones(1)))


@refused(TypeError, "bool")
def test_all_reduce_of_bools(strategy):
    strategy.run(lambda: mirror.get_replica_context().all_reduce("sum", torch.tensor(True)))


@refused(TypeError, "str")
def test_all_reduce_of_a_string(strategy):
    strategy.run(lambda: mirror.get_replica_context().all_reduce("sum", "text"))


@refused(ValueError, "sum")
def test_all_reduce_of_an_unknown_op(strategy):
    strategy.run(lambda: mirror.get_replica_context().all_reduce("avg", torch.ones(1)))


@refused((ValueError, TypeError), "sum", "mean")
def test_all_reduce_with_the_op_last(strategy):
    strategy.run(lambda: mirror.get_replica_context().all_reduce(torch.ones(1), "sum"))


def test_all_reduce_whose_result_is_dropped(strategy):
    """It is not in place, as torch.distributed's is."""

    def program():
        value = torch.full((1,), 1.0 + replica_id())
        total = mirror.get_replica_context().all_reduce("sum", value)
        return value, total

    values, totals = strategy.run(program)
    assert [v.item() for v in values.values] == [1.0, 2.0]
    assert [v.item() for v in totals.values] == [3.0, 3.0]


@refused(ValueError, "0-d")
def test_all_gather_of_0d(strategy):
    strategy.run(lambda: mirror.get_replica_context().all_gather(torch.tensor(1.0)))


@refused(StructureError, "2 parts", "3")
def test_a_value_of_a_larger_strategy(strategy):
    with mirror.MirroredStrategy(["cpu"] * 3) as other:
        value = other.run(lambda: torch.ones(1))
    strategy.run(lambda x: x, args=(value,))


@refused(StructureError, "2 parts", "3")
def test_reducing_a_value_of_a_larger_strategy(strategy):
    with mirror.MirroredStrategy(["cpu"] * 3) as other:
        value = other.run(lambda: torch.ones(1))
    strategy.reduce("sum", value)


@refused(TypeError, "args", "tuple")
def test_args_that_are_no_tuple(strategy, losses):
    strategy.run(lambda x: x, args=losses)


@refused(TypeError, "args", "tuple")
def test_a_tensor_as_args(strategy):
    strategy.run(lambda x: x, args=torch.ones(2))


@refused(TypeError, "args")
def test_the_batch_as_a_second_argument_of_its_own(strategy, losses):
    strategy.run(lambda x, y: x, losses, losses)


@refused(TypeError, "the function itself", "args")
def test_the_function_called_rather_than_given(strategy, losses):
    strategy.run((lambda: torch.ones(1))())


@refused(TypeError, "kwargs", "mapping")
def test_kwargs_that_are_no_dict(strategy):
    strategy.run(lambda x: x, kwargs=[1])


@refused(TypeError, "keyword")
def test_keyword_arguments_given_to_run_itself(strategy):
    strategy.run(lambda x: x, x=1)


@refused(TypeError, "missing", "replica 0 of 2")
def test_a_batch_that_is_not_unpacked(strategy):
    strategy.run(lambda x, y: x, args=((1, 2),))


@refused(TypeError, "async")
def test_a_coroutine_function(strategy):
    async def program():
        return 1

    strategy.run(program)


@refused(TypeError, "generator")
def test_a_generator_function(strategy):
    def program():
        yield torch.ones(1)

    strategy.run(program)


@refused(ValueError, "init_process_group", "all_reduce", "get_replica_context")
def test_gradients_averaged_by_torch_distributed(strategy):
    def program(model, optimizer, x, y):
        loss_of(model, x, y).backward()
        for p in model.parameters():
            torch.distributed.all_reduce(p.grad)

    trains_as_plain(strategy, program)


@refused(ValueError, "init_process_group", "replica_id_in_sync_group")
def test_the_rank_asked_of_torch_distributed(strategy):
    strategy.run(lambda: torch.distributed.get_rank() == 0)


@refused(ValueError, "init_process_group", "get_replica_context")
def test_a_barrier_of_torch_distributed(strategy):
    strategy.run(torch.distributed.barrier)


@refused(ValueError, "init_process_group")
def test_the_world_size_asked_of_torch_distributed(strategy):
    strategy.run(torch.distributed.get_world_size)


@refused(DivergenceError, "optimizer.step", "replica 0")
def test_the_step_on_one_replica_alone(strategy):
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
    (nn.functional.cross_entropy(expected(X[:4]), Y[:4]) / 2).backward()
    assert torch.allclose(model[0].weight.grad, expected[0].weight.grad)


@refused(DivergenceError, "all_reduce", "replica 0")
def test_a_collective_in_a_condition(strategy):
    def program():
        if replica_id() == 0:
            mirror.get_replica_context().all_reduce("sum", torch.ones(1))

    strategy.run(program)


@refused(DivergenceError, "merge_call")
def test_a_merge_call_in_a_condition(strategy):
    def program():
        if replica_id() == 1:
            mirror.get_replica_context().merge_call(lambda strategy: None)

    strategy.run(program)


@refused(DivergenceError, "float32[1]", "float32[2]")
def test_a_collective_of_unlike_shapes(strategy):
    strategy.run(
        lambda: mirror.get_replica_context().all_reduce("sum", torch.ones(1 + replica_id()))
    )


@refused(DivergenceError, "all_reduce", "all_gather")
def test_unlike_collectives(strategy):
    def program():
        context, value = mirror.get_replica_context(), torch.ones(1)
        return context.all_reduce("sum", value) if replica_id() else context.all_gather(value)

    strategy.run(program)


@refused(DivergenceError, "all_reduce")
def test_a_number_of_collectives_that_depends_on_the_replica(strategy):
    def program():
        for _ in range(1 + replica_id()):
            mirror.get_replica_context().all_reduce("sum", torch.ones(1))

    strategy.run(program)


@refused(DivergenceError, "replica")
def test_an_early_return_before_a_collective(strategy):
    def program():
        if replica_id():
            return torch.zeros(1)
        return mirror.get_replica_context().all_reduce("sum", torch.ones(1))

    strategy.run(program)


def test_a_collective_whose_error_is_swallowed(strategy):
    def program():
        try:
            if replica_id():
                mirror.get_replica_context().all_reduce("sum", torch.ones(1))
        except Exception:
            pass

    with pytest.raises(DivergenceError):
        strategy.run(program)


@refused(mirror.StructureError, "same structure")
def test_results_of_unlike_structure(strategy):
    strategy.run(lambda: {"a": 1} if replica_id() else {"b": 1})


@refused(mirror.StructureError, "same structure")
def test_a_result_on_the_first_replica_alone(strategy):
    strategy.run(lambda: {"loss": 1} if replica_id() == 0 else None)


def test_early_stopping_on_a_replicas_own_loss(strategy):
    def program(model, optimizer, x, y):
        for _ in range(3):
            loss = step(model, optimizer, x, y)
            if loss.item() < 0.69 and replica_id() == 0:
                return
            if replica_id() == 0:
                return

    with pytest.raises(DivergenceError, match="replica 0"):
        trains_as_plain(strategy, program)
