"""Verifies split calls: the first call of each kind is compared with one device.

How the outputs of a split call join is a guess, by their shapes and graphs. So with
``verify="first"`` or ``"error"`` the first call of each kind is also made on the whole batch,
before the replicas make theirs, and every output that the caller gets is compared with that.

    a call's kind: the module's mode, the grad mode, whether parts are uneven, and the types,
    dtypes and numbers of dimensions of the arguments

[Note: Trials]
A trial calls the module on the first replica, in a run of that replica alone, so a collective
returns what it is given. A trial leaves no trace:

    state                              in a trial
    arguments, attributes of modules   copies
    buffers                            copies of the first replica's
    parameters that forward writes     restored from the second replica, which has equal bits
    the number of replicas             1
    what a LightningModule logs        not logged
    random generators                  restored
    gradients                          none are computed; where forward needs a graph, no backward
                                       pass may accumulate gradients
    forward hooks of the program       not called, unless the outputs differ without them

Printed text, files, and objects that hold more than data are not restored: forward runs once more.
If a state cannot be copied (a dict whose class refuses it), there is no trial.

A trial that is compared has no hooks of its own, since forward may take another path with hooks
(``nn.TransformerEncoder`` does). Before a difference is reported, two more trials are compared
with each other. Outputs that differ there are those of a clock, of ``uuid`` or ``secrets``.

Outputs of a call that draws random numbers, or that normalises with the statistics of the part
(BatchNorm, which has a message of its own), are compared in structure and shape only.

A difference may be rounding. So a last trial adds rounding errors to the outputs of all layers,
which shows how far such errors carry.
"""

from __future__ import annotations

import array
import copy
import logging
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import is_dataclass
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mirror.base.torch_private import (
    FORWARD_HOOKS,
    read_parametrize_cache,
    write_parametrize_cache,
)
from mirror.device.device_mesh import DeviceMesh
from mirror.devices import random_state, set_random_state, using
from mirror.errors import StrategyError
from mirror.execution.run import (
    Replica,
    Run,
    Unverifiable,
    current,
    push_context,
    save_context,
)
from mirror.execution.runner import Runner
from mirror.replica.exactness.cross_example_ops import GATHER_FIRST
from mirror.replica.exactness.layer_sums import LayerSums, RoundingErrors
from mirror.replica.exactness.output_comparison import OutputDifference, find_output_differences
from mirror.replica.modules.module_owner import interceptor_of
from mirror.replica.modules.per_replica_values import PerReplicaAttribute
from mirror.replica.params.buffer_differences import BATCH_NORMS, have_equal_values
from mirror.replica.params.mirrored_buffer import MirroredBuffer, ReplicatedBuffer
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.replica.params.replicated_param import ReplicatedParam
from mirror.replica.params.torch_function import MirroredParameter
from mirror.replica.scatter_gather.containers import (
    IMMUTABLE,
    assign,
    contents_of,
    empty_like,
    is_consumed,
    is_leaf,
    is_object,
    is_shared,
    leaves_in,
)
from mirror.replica.scatter_gather.scatter import ReplicaArgs, SplitPlan
from mirror.threads.merge_point import NullLockstep
from mirror.threads.user_frames import num_warned, warn_user
from mirror.values import PerReplica, leaves_of, rebuild_node

WRITTEN = "is written by forward"
MOST_KINDS = 16  # of one module: the usual program has two or three
_NOISE_FACTOR = 8  # by which a distance may exceed that of a call with rounding errors
_TORCHS = frozenset(nn.Module().__dict__)
_TABLES = {name for name in _TORCHS if isinstance(nn.Module().__dict__[name], dict)}
_CPU = torch.device("cpu")
_BUILT_IN = frozenset((list, tuple, set, dict))
# Implemented in C, and changed by their methods, but copied by ``copy.deepcopy`` like data.
_COPIED = (
    *(random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator),
    *(bytearray, array.array),
)
_logger = logging.getLogger("mirror")

_REMEDIES = {
    "number": (
        "Return one value per example, or compute it outside the model; if the model divides a "
        "sum by a number of the batch, pass the whole batch's as num_items_in_batch"
    ),
    "rows": f"If forward computes over the examples of the batch: {GATHER_FIRST}",
    "parameter": (
        "The first replica's values are kept; write what all replicas give, with "
        "mirror.get_replica_context().all_gather(value), or write it outside forward"
    ),
    "structure": (
        "Return tensors that have the examples as their first dimension, or call the module "
        "inside strategy.run, where each replica has its own outputs"
    ),
}


Hook = Callable[[nn.Module, Any, Any], Any]
_listeners: list[Callable[[str], object]] = []


@contextmanager
def recording_unequal_calls(listener: Callable[[str], object]) -> Iterator[None]:
    """Calls a function, inside, with a sentence on each split call that differs."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class VerifiedCall:
    """One split call, and the trial that it is compared with.

    Attributes:
        writes_inputs: whether forward has written to a tensor among its arguments.

    Args:
        args, kwargs: the caller's, which a trial does not change.
        sizes: the replicas' numbers of examples.
        call: calls the module on a replica, with its arguments.
    """

    def __init__(
        self,
        runner: Runner,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sizes: Sequence[int],
        call: Callable[[Replica, tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        self._runner, self._module, self._make_call = runner, module, call
        self._args, self._kwargs = args, kwargs
        self._sizes = sizes
        self._modules = list(module.modules())
        self._draws = self._has_hooks = self.writes_inputs = False
        self._written = set[ReplicatedParam]()
        self._whole: Any = None
        self._copied: tuple[Any, Any] = ((), {})
        self._error: Exception | None = None
        self._num_warned = num_warned()

    def begin(self) -> bool:
        """Makes the trial; returns whether there is something to compare with."""
        try:
            self._runner.prepare("a call of a mirrored module")
            places = self._runner.replicas.places
            with _telling_what_fails():
                self._copied = _Copies(places).copy((self._args, self._kwargs))
            self._whole = self._call()
        except Unverifiable as why:
            return self._leave_out(str(why))
        except torch.OutOfMemoryError:
            return self._leave_out("the whole batch does not fit on the first device")
        except Exception as error:
            self._error = error.with_traceback(None)
        return True

    def _leave_out(self, why: str) -> bool:
        name = type(self._module).__name__
        _logger.info("a split call of %s is not compared with one device: %s", name, why)
        return False

    def varying_numbers(self, joined: Any) -> set[int]:
        """Returns the positions, among the leaves of the outputs, of numbers of the part.

        Counts of correct predictions, say: if they happen to be equal they are no constant.
        """
        some, others = leaves_of(joined), leaves_of(self._whole)
        if self._error is not None or len(some) != len(others):
            return set()
        return {
            i
            for i, (one, other) in enumerate(zip(some, others, strict=True))
            if type(other) in (int, float) and (isinstance(one, PerReplica) or one != other)
        }

    def compare(self, joined: Any, *, raises: bool) -> None:
        """Compares the outputs of the split call with those of the whole batch.

        Warns of the first difference, unless the call itself has warned already.

        Raises:
            StrategyError: an output differs, and ``raises`` is set.
        """
        if not raises and num_warned() > self._num_warned:
            return
        difference = self._find_written() or self._find(joined)
        if difference is None:
            return
        name, where = type(self._module).__name__, self._find_layer()
        what = (
            f"a split call of {name} does not return what one device does: {difference.path} "
            f"{difference.what}{where}. {_REMEDIES[difference.kind]}"
        )
        for listener in _listeners:
            listener(what)
        message = (
            f"{what}. `mirror check SCRIPT` compares a whole training; MirroredStrategy(..., "
            'verify="off") leaves this comparison out'
        )
        if raises:
            raise StrategyError(message)
        warn_user(message)

    def _find_written(self) -> OutputDifference | None:
        """Returns the first parameter that forward has left different on the replicas."""
        for variable in sorted(self._written, key=lambda variable: variable.name):
            first, *others = variable.copies
            if not all(have_equal_values(copy.detach(), first.detach()) for copy in others):
                what = f"{WRITTEN}, for the replica's own examples"
                return OutputDifference(f"parameter {variable.name!r}", what, "parameter")
        return None

    def _find(self, joined: Any) -> OutputDifference | None:
        """Returns the first output that differs by more than rounding."""
        if self._error is not None:
            name, text = type(self._error).__name__, str(self._error)[:300]
            what = f"returns, and on one device {name} is raised: {text}"
            return OutputDifference("it", what, "structure")
        found = self._find_all(joined)
        if not found:
            return None
        try:
            # The state is that after the call now, so these are compared with each other.
            late = self._call(calls_hooks=True)
            if self._has_hooks:
                self._whole = late
                found = self._find_all(joined)
            again = self._call(calls_hooks=True) if found else late
        except Exception:  # memory, say: what is known is told
            return found[0]
        varying = {one.path for one in find_output_differences(again, late)}
        found = [one for one in found if one.path not in varying]
        if not found or found[0].distance == float("inf"):
            return found[0] if found else None
        try:
            noisy = self._call(RoundingErrors(), calls_hooks=True)
        except Exception:  # memory, say: what is known is told
            return found[0]
        errors = find_output_differences(noisy, late, tolerance=0.0)
        spread = {error.path: error.distance for error in errors}
        return next(
            (one for one in found if one.distance > _NOISE_FACTOR * spread.get(one.path, 0.0)),
            None,
        )

    def _find_layer(self) -> str:
        """Returns words on the first submodule whose output differs; none if it is unknown.

        The module is called on each part in turn, on the first replica.
        """
        whole, sums, start = LayerSums(), LayerSums(), 0
        try:
            self._call(whole.adding(0, sum(self._sizes)))
            for size in self._sizes:
                if size:
                    self._call(sums.adding(start, size), part=(start, size))
                start += size
        except Exception:  # a collective, say, which needs all replicas
            return ""
        layer = whole.first_other_than(sums)
        name = next((n for n, one in self._module.named_modules() if one is layer), "")
        kind = type(layer).__name__
        return f"; the first module with another output is {name!r} ({kind})" if name else ""

    def _find_all(self, joined: Any) -> list[OutputDifference]:
        values = not self._draws and not any(map(_uses_statistics_of_batch, self._modules))
        return list(find_output_differences(joined, self._whole, values=values))

    def _call(
        self, hook: Hook | None = None, *, calls_hooks: bool = False, part: Any = None
    ) -> Any:
        """Calls the module on the whole batch, or on a part of it. See [Note: Trials].

        Args:
            hook: a forward hook for all submodules.
            calls_hooks: whether the program's forward hooks are called.
            part: the first example of the part, and their number.
        """
        try:
            with torch.no_grad():
                return self._call_once(hook, calls_hooks, part)
        except torch.OutOfMemoryError:
            raise
        except Unverifiable:
            raise
        except Exception:
            # A forward that differentiates, as for forces, or sets hooks, needs a graph.
            if not torch.is_grad_enabled():
                raise
        return self._call_once(hook, calls_hooks, part)

    def _call_once(self, hook: Hook | None, calls_hooks: bool, part: Any) -> Any:
        replicas = self._runner.replicas
        num_examples, others = sum(self._sizes), [0] * (len(self._sizes) - 1)
        weights = [num_examples if part is None else part[1], *others]
        # Of a part alone a collective has no result, and raises.
        run = Run(replicas, NullLockstep(), (0,), weights, is_default=part is None)
        run.is_split = run.is_trial = True
        replica = run.members[0]
        with ExitStack() as stack:
            with _telling_what_fails():
                states, args, kwargs = self._prepare(stack, run, hook, calls_hooks, part)
            versions = [
                (leaf, leaf._version) for leaf in leaves_in((args, kwargs)) if _has_version(leaf)
            ]
            before = save_context()
            push_context(replicas.strategy, replica)
            try:
                output = self._make_call(replica, args, kwargs)
            finally:
                self.writes_inputs |= any(leaf._version != version for leaf, version in versions)
                current.replica, current.strategy, current.below = before
            self._draws = self._draws or _generator_states(replicas.devices[0]) != states
        return output

    def _prepare(
        self, stack: ExitStack, run: Run, hook: Hook | None, calls_hooks: bool, part: Any
    ) -> tuple[Any, Any, Any]:
        """Makes copies of the state; returns the generators' states, and the arguments."""
        replicas, enter = run.replicas, stack.enter_context
        args, kwargs = _Copies().copy(self._copied)
        if part is not None:
            sizes = [part[1], *[0] * (len(self._sizes) - 1)]
            split = SplitPlan(sizes, replicas.places, sum(self._sizes))
            split.starts[0] = part[0]
            args, kwargs = ReplicaArgs(split, 0).from_call(args, kwargs)
        if isinstance(hook, RoundingErrors):
            args, kwargs = hook.add_to_inputs((args, kwargs))
        states = enter(_keeping_generators(replicas.devices[0]))
        enter(_copying_attributes(self._modules))
        if not calls_hooks:
            self._has_hooks |= _remove_hooks(self._modules)
        enter(_copying_buffers(self._modules))
        enter(_keeping_parameters(self._modules, run, self._written))
        enter(_without_caches())
        enter(using(replicas.devices[0]))
        enter(warnings.catch_warnings())  # the replicas' calls will warn
        warnings.simplefilter("ignore")
        if hook is not None:
            enter(_hooking(self._modules, hook))
        return states, args, kwargs


@contextmanager
def _telling_what_fails() -> Iterator[None]:
    """Raises Unverifiable for an error inside, which is none of forward."""
    try:
        yield
    except (Unverifiable, torch.OutOfMemoryError):
        raise
    except Exception as error:
        name, text = type(error).__name__, str(error)[:300]
        raise Unverifiable(f"its state cannot be copied, {name}: {text}") from None


def _has_version(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_inference()


class _Copies:
    """Copies values that forward could change; what is one object stays one.

    Args:
        places: copies of tensors are on the first replica's devices; by default where they were.
    """

    def __init__(self, places: DeviceMesh | None = None) -> None:
        self._places = places
        self._known: dict[int, tuple[Any, Any]] = {}
        self._is_in_data = False  # what data holds is data, which is not looked for again

    def copy(self, value: Any) -> Any:
        """Returns a copy of everything mutable in a value.

        Raises:
            Unverifiable: the value holds an iterator, or values of other replicas.
        """
        if type(value) in IMMUTABLE or isinstance(value, MirroredTensor):
            return value
        if id(value) not in self._known:
            made = self._copy(value)
            self._known[id(value)] = value, made
        return self._known[id(value)][1]

    def _copy(self, value: Any) -> Any:
        if isinstance(value, PerReplica):
            raise Unverifiable("a value is a PerReplica, which has no part for the whole batch")
        if is_consumed(value):
            raise Unverifiable(f"a {type(value).__name__} would be consumed twice")
        if isinstance(value, Tensor):
            return self._copy_tensor(value)
        if isinstance(value, np.ndarray):
            return value.copy()
        if isinstance(value, _COPIED):
            return copy.deepcopy(value)
        if type(value) in _BUILT_IN:  # tables may hold a million numbers
            entries = value.values() if type(value) is dict else value
            if IMMUTABLE.issuperset(map(type, entries)):
                return copy.copy(value)
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if is_leaf(value) or (not self._is_in_data and is_shared(value)):
            return value
        is_outermost = not self._is_in_data and is_object(value) and not is_dataclass(value)
        try:
            self._is_in_data |= is_outermost
            return self._copy_contents(value)
        finally:
            self._is_in_data &= not is_outermost

    def _copy_contents(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return rebuild_node(value, {k: self.copy(v) for k, v in contents_of(value).items()})
        made = empty_like(value)
        self._known[id(value)] = value, made  # before its contents, since it may hold itself
        return assign(made, {key: self.copy(child) for key, child in contents_of(value).items()})

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) or tensor.is_meta:
            return tensor
        device = tensor.device if self._places is None else self._places.peers_of(tensor.device)[0]
        made = tensor.detach().to(device, copy=True)
        made.requires_grad_(tensor.requires_grad)
        self._known[id(tensor)] = tensor, made  # before its attributes, which may hold it
        made.__dict__.update({k: self.copy(v) for k, v in tensor.__dict__.items()})
        return made


@contextmanager
def _copying_attributes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Gives modules copies of their attributes, inside; none of the replicas' own."""
    copies, before = _Copies(), list[tuple[dict[str, Any], dict[str, Any]]]()
    own = list[tuple[dict[str, PerReplicaAttribute], dict[str, Any]]]()
    tables = list[tuple[dict[Any, Any], dict[Any, Any]]]()
    try:
        for module in modules:
            attributes: dict[str, PerReplicaAttribute] = getattr(interceptor_of(module), "own", {})
            own.append((attributes, {name: one.suspend() for name, one in attributes.items()}))
            before.append((module.__dict__, dict(module.__dict__)))
            # Hooks and submodules that forward adds, at its first call say.
            for name in module.__dict__.keys() & _TABLES:
                tables.append((module.__dict__[name], dict(module.__dict__[name])))
            for name, value in before[-1][1].items():
                if name not in _TORCHS and not isinstance(value, (nn.Module, nn.Parameter)):
                    module.__dict__[name] = copies.copy(value)
        yield
    finally:
        for held, values in (*before, *tables):
            for name in held.keys() - values.keys():
                del held[name]
            held.update(values)
        for attributes, states in own:
            for name in attributes.keys() - states.keys():
                del attributes[name]
            for name, state in states.items():
                attributes[name].resume(state)


def _remove_hooks(modules: Iterable[nn.Module]) -> bool:
    """Removes the forward hooks that are not torch's; returns whether there were any.

    ``_copying_attributes`` restores them.
    """
    has_found = False
    for module in modules:
        for name in FORWARD_HOOKS:
            hooks = module.__dict__.get(name, {})  # a ScriptModule has none
            for key, hook in list(hooks.items()):
                kind = hook if isinstance(hook, FunctionType) else type(hook)
                if not kind.__module__.startswith("torch."):
                    del hooks[key]
                    has_found = True
    return has_found


@contextmanager
def _copying_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Gives the first replica copies of its buffers, inside."""
    before = list[tuple[ReplicatedBuffer, Any]]()
    try:
        for module in modules:
            # Plain tensors that are attributes are mirrored like buffers.
            own = module.__dict__
            for buffer in (*own.get("_buffers", {}).values(), *own.values()):
                if isinstance(buffer, MirroredBuffer):
                    before.append((buffer._mirrored, buffer._mirrored.lend_copy(0)))
        yield
    finally:
        for record, state in reversed(before):  # a buffer may be in two modules
            record.give_back(0, state)


@contextmanager
def _keeping_parameters(
    modules: Iterable[nn.Module], run: Run, written: set[ReplicatedParam]
) -> Iterator[None]:
    """Restores parameters that the first replica writes inside, and adds them to ``written``.

    What is written through ``p.data`` has no new version, but the run has recorded it.
    """
    variables = {
        parameter._mirrored
        for module in modules
        for parameter in module.__dict__.get("_parameters", {}).values()
        if isinstance(parameter, MirroredParameter)
    }
    before = [(v, v.copies[0]._version, v.copies[0].shape) for v in variables]
    try:
        yield
    finally:
        for variable, version, shape in before:
            now = variable.copies[0]
            is_changed = now._version != version or now.shape != shape
            if not is_changed and variable in run.assigned:
                is_changed = not have_equal_values(now.detach(), variable.copies[1].detach())
            if is_changed:
                written.add(variable)
                with torch.no_grad():
                    variable.broadcast(1, [0])


@contextmanager
def _keeping_generators(device: torch.device) -> Iterator[tuple[Any, ...]]:
    """Restores the states of the global random generators; yields these."""
    states = _generator_states(device)
    try:
        yield states
    finally:
        for place, state in states[0].items():
            set_random_state(place, torch.frombuffer(bytearray(state), dtype=torch.uint8))
        random.setstate(states[1])
        np.random.set_state(states[2])


def _generator_states(device: torch.device) -> tuple[Any, ...]:
    places = dict.fromkeys((_CPU, device))
    of_torch = {place: random_state(place).numpy().tobytes() for place in places}
    kind, keys, *rest = np.random.get_state(legacy=True)
    return of_torch, random.getstate(), (kind, tuple(keys), *rest)


@contextmanager
def _without_caches() -> Iterator[None]:
    """Keeps autocast and ``parametrize.cached`` from caching values without a graph."""
    casts, parametrized = torch.is_autocast_cache_enabled(), read_parametrize_cache()
    torch.set_autocast_cache_enabled(False)
    write_parametrize_cache((0, {}))
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(casts)
        write_parametrize_cache(parametrized)


def _uses_statistics_of_batch(module: nn.Module) -> bool:
    is_batch_norm = isinstance(module, BATCH_NORMS)
    return is_batch_norm and (module.training or module.running_mean is None)


@contextmanager
def _hooking(modules: Sequence[nn.Module], hook: Hook) -> Iterator[None]:
    """Adds a forward hook to all submodules, or to a module without any, inside."""
    handles = [module.register_forward_hook(hook) for module in modules[1:] or modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
