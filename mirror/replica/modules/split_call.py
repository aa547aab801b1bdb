"""The transparent call: a mirrored module called outside ``run`` splits its call and joins it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mirror.base.dynamo import DynamoCallback, call_under_dynamo, limits_for, resume_dynamo
from mirror.base.torch_private import (
    WHOLE_CALL,
    Loss,
    functions_interpreter,
    tracing_state,
    transforms_of,
)
from mirror.data.split_batch import split_sizes
from mirror.errors import StrategyError
from mirror.execution.current_replica import current
from mirror.execution.runner import Runner
from mirror.replica.modules.call_interceptor import ModuleRecorder
from mirror.replica.modules.metric_calls import is_metric
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.replica.scatter_gather.containers import IMMUTABLE, is_in, leaves_in
from mirror.replica.scatter_gather.gather import Gatherer, join_outputs
from mirror.replica.scatter_gather.mutations import join_changes
from mirror.replica.scatter_gather.recurrent_states import LAYERS, is_sequence_first
from mirror.replica.scatter_gather.scatter import ReplicaArgs, SplitPlan, describe_split, must_move
from mirror.threads.user_frames import add_note
from mirror.values import PerReplica

# Makes a replica's call, given its id: what calls it may note what that does, and return more.
Each = Callable[[int, "partial[Any]"], Any]


class MirroringModules(ModuleRecorder, Protocol):
    """Who keeps modules mirrored, as a call in the cross-replica context sees it."""

    @property
    def runner(self) -> Runner:
        """What runs the parts of a call."""

    def mirror_recorded(self) -> None:
        """Mirrors what has been recorded."""


def call_split(
    modules: MirroringModules,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    whole: Callable[..., Any],
    hold: DynamoCallback,
    each: Each | None = None,
) -> Any:
    """Calls a mirrored module in the cross-replica context.

    Tensors that share the first dimension of the first one are split, everything else goes to
    every replica; see [Note: Arguments that forward changes]. Runs on the first replica alone
    what must not be split: torch's losses, whose value need not be a mean over examples, a module
    without variables, a call without batched tensors, and a module whose own batch dimension is
    not the first (an ``nn.LSTM`` without ``batch_first``).

    Args:
        whole: calls the module without splitting.
        hold: what the compiler had on the calling thread. See [Note: Compiled calls].
        each: makes the calls of the replicas, if the call is split.

    Raises:
        BatchError: an argument is a PackedSequence, which cannot be split along its data.
        StrategyError: an argument is an iterator, or was changed in ways that cannot be joined; or
            torch.func differentiates by parameters where several workers take part.
    """
    if _is_tracing():
        if modules.runner.replicas.workers.is_multi_process:
            _refuse_own_gradients(module, args, kwargs)
        return getattr(module, WHOLE_CALL)(*args, **kwargs)
    modules.mirror_recorded()
    runner, replicas = modules.runner, modules.replicas
    if not replicas.mirrors:
        return _call_whole(runner, args, kwargs, lambda *a, **k: _held(hold, whole, a, k))
    sizes = _sizes(replicas.num_replicas, args, kwargs) if _splits(module) else None
    if sizes is None:
        runner.prepare("a call of a mirrored module")
        if _is_lazy(module):
            modules.record(module)  # it gets its parameters now, and is mirrored at its next use
        elif replicas.has_parameter_device and next(module.parameters(), None) is not None:
            return _call_on_first(runner, args, kwargs, partial(call_under_dynamo, hold, module))
        current.in_whole_call = True
        try:
            return _call_whole(runner, args, kwargs, whole)
        finally:
            current.in_whole_call = False
    if each is None and replicas.num_replicas == 1 and _are_whole(runner, args, kwargs):
        return _call_lone(runner, module, args, kwargs, hold, sizes)
    split = SplitPlan(sizes, replicas.places, sum(sizes), runner.copies)
    split.pin((args, kwargs))
    parts = {r: ReplicaArgs(split, r) for r in split.active}
    names = _positional_names(module)

    def call(replica_id: int) -> Any:
        replica = current.replica
        assert replica is not None
        replica.run.is_split = True
        own_args, own_kwargs = parts[replica_id].from_call(args, kwargs, names)
        if each is not None:
            return each(replica_id, partial(call_under_dynamo, hold, module, own_args, own_kwargs))
        return call_under_dynamo(hold, module, own_args, own_kwargs)

    try:
        with limits_for(replicas.num_replicas):
            run = runner.run(call, split.active, weights=sizes)
        own = [parts[r] for r in run.results]
        joined = join_outputs(runner, run.results, sizes, own, module)
        _take_changes(runner, own, list(run.results), args, kwargs)
    except Exception as error:
        add_note(error, _describe_sizes(module, split, args, kwargs))
        raise
    finally:
        split.finish()
    return joined


def _are_whole(runner: Runner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the only replica may have a call's arguments themselves: plain tensors, numbers."""
    if not runner.replicas.are_simulated:
        return False
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind is Tensor:
            if not value.is_cpu:
                return False
        elif kind not in IMMUTABLE:
            return False
    return True


def _call_lone(
    runner: Runner,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    hold: DynamoCallback,
    sizes: Sequence[int],
) -> Any:
    """Calls a module on the only replica of one of several workers.

    It has what the caller has passed: what it changes there is changed.
    """

    def call(replica_id: int) -> Any:
        replica = current.replica
        assert replica is not None
        replica.run.is_split = True
        return call_under_dynamo(hold, module, args, kwargs)

    try:
        run = runner.run(call, (0,), weights=sizes)
        result = run.results[0]
        if type(result) is Tensor and result.shape[:1] == (sizes[0],):
            return result
        part = ReplicaArgs(SplitPlan(sizes, runner.replicas.places, sizes[0]), 0)
        return join_outputs(runner, run.results, sizes, [part], module)
    except Exception as error:
        split = SplitPlan(sizes, runner.replicas.places, sizes[0])
        add_note(error, _describe_sizes(module, split, args, kwargs))
        raise


def _call_whole(
    runner: Runner, args: tuple[Any, ...], kwargs: dict[str, Any], whole: Callable[..., Any]
) -> Any:
    """Calls a module on the first replica, with its arguments moved there."""
    if not must_move((args, kwargs), runner.replicas.places.replicas[0]):
        return whole(*args, **kwargs)
    split = SplitPlan([1], runner.replicas.places, None, runner.copies)
    part = ReplicaArgs(split, 0)
    split.pin((args, kwargs))
    try:
        own_args, own_kwargs = part.from_call(args, kwargs)
        result = whole(*own_args, **own_kwargs)
    finally:
        split.finish()
    _take_changes(runner, [part], [0], args, kwargs)
    return result


def _call_on_first(
    runner: Runner, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
) -> Any:
    """Calls a module in a run of the first replica, where parameters have a home of their own.

    At home there are no buffers, and it is not where the arguments are to go.
    """

    def whole(*args: Any, **kwargs: Any) -> Any:
        return runner.run(lambda replica_id: call(args, kwargs), (0,)).results[0]

    return _call_whole(runner, args, kwargs, whole)


def _held(
    hold: DynamoCallback, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    resume_dynamo(hold)
    return whole(*args, **kwargs)


def _take_changes(
    runner: Runner,
    parts: Sequence[ReplicaArgs],
    ids: Sequence[int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    if not any(part.given or part.tensors or part.shared for part in parts):
        return
    joiner = Gatherer(runner, parts[0].split.sizes, ids, parts)
    join_changes(parts, joiner, lambda value: _name_of(value, args, kwargs))


def _name_of(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns which argument is, or holds, a value."""
    for name, argument in (*enumerate(args), *kwargs.items()):
        if is_in(value, argument):
            inside = "" if argument is value else f", a {type(value).__name__} in it"
            return f"argument {name!r} ({type(argument).__name__}{inside})"
    return f"an argument ({type(value).__name__})"


def _describe_sizes(
    module: nn.Module, split: SplitPlan, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """Returns how a call was split, for the error that it ended in."""
    return (
        f"this call of {type(module).__name__} was split over {len(split.active)} replicas by the "
        f"first dimension, {split.num_examples}: {describe_split(split, args, kwargs)}. "
        "If something "
        "was split that holds no examples, give it another first dimension (x[None]) or make it "
        "in forward; to split by hand, call the module inside strategy.run"
    )


def _sizes(
    num_replicas: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[int] | None:
    """Returns the sizes of the parts; ``None`` without any tensor that could be split."""
    num_examples, distributed = None, None
    if not kwargs and len(args) == 1 and type(args[0]) is Tensor:  # seen at once
        shape = args[0].shape
        return split_sizes(shape[0], num_replicas) if shape and not args[0].is_meta else None
    for leaf in leaves_in((args, kwargs)):
        if isinstance(leaf, Tensor):
            if num_examples is None and leaf.dim() > 0:
                num_examples = leaf.shape[0]
                if leaf.is_meta:
                    return None  # of shapes alone there is no part
        elif isinstance(leaf, PerReplica) and distributed is None:
            distributed = _sizes_of(leaf, num_replicas)
    if num_examples is None or (distributed is not None and sum(distributed) == num_examples):
        return distributed
    return split_sizes(num_examples, num_replicas)


def _sizes_of(value: PerReplica[Any], num_replicas: int) -> list[int] | None:
    """Returns the numbers of examples of the parts, of what a call or a loader has split."""
    if len(value.values) != num_replicas:
        return None
    if value.weights is not None and all(float(w).is_integer() for w in value.weights):
        return [int(weight) for weight in value.weights]
    sizes = [0] * num_replicas
    for replica_id, part in value.parts():
        shapes = [leaf.shape for leaf in leaves_in(part) if isinstance(leaf, Tensor)]
        if not shapes or not shapes[0]:
            return None
        sizes[replica_id] = shapes[0][0]
    return sizes


def _positional_names(module: nn.Module) -> Sequence[str]:
    """Returns the names of forward's positional parameters, of a forward in Python."""
    code = getattr(type(module).forward, "__code__", None)
    return () if code is None else code.co_varnames[1 : code.co_argcount]


def _splits(module: nn.Module) -> bool:
    if isinstance(module, LAYERS) and is_sequence_first(module):
        return False
    if isinstance(module, Loss) or is_metric(module):
        return False
    # As in parameters() and buffers(), but most calls find one at the first look.
    modules, seen = [module], set[nn.Module]()
    for one in modules:
        if one in seen:
            continue
        seen.add(one)
        for tensors in (one._parameters, one._buffers):
            for tensor in tensors.values():
                if tensor is not None and (isinstance(tensor, MirroredTensor) or is_lazy(tensor)):
                    return True
        modules += [child for child in one._modules.values() if child is not None]
    return False


def _is_tracing() -> bool:
    """Whether something follows this thread through one plain module: tracing, torch.func."""
    if tracing_state() is not None or functions_interpreter() is not None:
        return True
    return torch.compiler.is_exporting()


def _refuse_own_gradients(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Raises StrategyError where torch.func differentiates by the parameters of a module.

    Its transforms end in C, where no other worker's gradient can be added. What ``vmap`` makes of
    single examples is this worker's as the examples are, and what it makes by inputs, too.
    """
    found = set().union(*map(transforms_of, module.parameters()))
    if "grad" not in found:
        return
    inputs = [leaf for leaf in leaves_in((args, kwargs)) if isinstance(leaf, Tensor)]
    if "vmap" not in found and any("vmap" in transforms_of(leaf) for leaf in inputs):
        return
    raise StrategyError(
        f"torch.func differentiates a mirrored {type(module).__name__} by its parameters outside "
        "run, on one of several workers: the gradient would be of this worker's examples alone; "
        "use loss.backward() or torch.autograd.grad(loss, parameters), which give that of all "
        "workers"
    )


def _is_lazy(module: nn.Module) -> bool:
    return any(is_lazy(tensor) for tensor in chain(module.parameters(), module.buffers()))
