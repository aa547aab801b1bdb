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

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mirror.base.bitwise import have_equal_numbers
from mirror.base.containers import leaves_in
from mirror.devices import using
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
from mirror.replica.exactness.layer_sums import LayerSums, RoundingErrors
from mirror.replica.exactness.local_losses import GATHER_FIRST
from mirror.replica.exactness.output_comparison import OutputDifference, find_output_differences
from mirror.replica.modules.trial_state import (
    Copies,
    copying_attributes,
    copying_buffers,
    generator_states,
    keeping_generators,
    keeping_parameters,
    remove_hooks,
    telling_what_fails,
    without_caches,
)
from mirror.replica.params.buffer_differences import BATCH_NORMS
from mirror.replica.params.replicated_param import ReplicatedParam
from mirror.replica.scatter_gather.scatter import ReplicaArgs, SplitPlan
from mirror.threads.merge_point import NullLockstep
from mirror.threads.user_frames import num_warned, warn_user
from mirror.values import PerReplica, leaves_of

WRITTEN = "is written by forward"
MOST_KINDS = 16  # of one module: the usual program has two or three
_NOISE_FACTOR = 8  # by which a distance may exceed that of a call with rounding errors
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
            mesh = self._runner.replicas.mesh
            with telling_what_fails():
                self._copied = Copies(mesh).copy((self._args, self._kwargs))
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
            if not all(have_equal_numbers(copy.detach(), first.detach()) for copy in others):
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
        except (torch.OutOfMemoryError, Unverifiable):
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
            with telling_what_fails():
                states, args, kwargs = self._prepare(stack, run, hook, calls_hooks, part)
            tensors = [leaf for leaf in leaves_in((args, kwargs)) if isinstance(leaf, Tensor)]
            versions = [(leaf, leaf._version) for leaf in tensors if not leaf.is_inference()]
            before = save_context()
            push_context(replicas.strategy, replica)
            try:
                output = self._make_call(replica, args, kwargs)
            finally:
                self.writes_inputs |= any(leaf._version != version for leaf, version in versions)
                current.replica, current.strategy, current.below = before
            self._draws = self._draws or generator_states(replicas.devices[0]) != states
        return output

    def _prepare(
        self, stack: ExitStack, run: Run, hook: Hook | None, calls_hooks: bool, part: Any
    ) -> tuple[Any, Any, Any]:
        """Makes copies of the state; returns the generators' states, and the arguments."""
        replicas, enter = run.replicas, stack.enter_context
        args, kwargs = Copies().copy(self._copied)
        if part is not None:
            sizes = [part[1], *[0] * (len(self._sizes) - 1)]
            split = SplitPlan(sizes, replicas.mesh, sum(self._sizes))
            split.starts[0] = part[0]
            part = ReplicaArgs(split, 0, args, kwargs)
            args, kwargs = part.args, part.kwargs
        if isinstance(hook, RoundingErrors):
            args, kwargs = hook.add_to_inputs((args, kwargs))
        states = enter(keeping_generators(replicas.devices[0]))
        enter(copying_attributes(self._modules))
        if not calls_hooks:
            self._has_hooks |= remove_hooks(self._modules)
        enter(copying_buffers(self._modules))
        enter(keeping_parameters(self._modules, run, self._written))
        enter(without_caches())
        enter(using(replicas.devices[0]))
        enter(warnings.catch_warnings())  # the replicas' calls will warn
        warnings.simplefilter("ignore")
        if hook is not None:
            enter(_hooking(self._modules, hook))
        return states, args, kwargs


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
