"""CallInterceptor: a call of a mirrored module is split over the replicas, or just runs.

    call                                        what happens
    outside ``run``                             ``_split``: the arguments are scattered, every
                                                replica calls the module, the outputs are gathered
    of a submodule, or on a replica             the module's own call, on the replica's copies
    in a backward pass outside ``run``          the module's own call, on the copies of one
                                                replica, see below

Torch calls the entry ``_compiled_call_impl`` of ``module.__dict__`` without the module as an
argument. Libraries for meta-learning copy that dict by hand into another module, to run forward
with other parameters, and so copy this interceptor. (Ordinary copies and pickles have ``None``.)
So a call checks which module holds the interceptor. If it is not its own module, the call is an
ordinary one; such a module is an ordinary module that shares mirrored parameters.

Activation checkpointing calls part of a forward again, in the backward pass. Outside ``run`` that
pass goes through the graphs of all replicas in one thread, where no replica is current, and a
submodule called there must not split what is one replica's part already. The ancestors of the node
that the engine executes include a copy, which shows the replica. If the whole call of a module was
under checkpointing, outside ``run``, it is split again.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from mirror.base.containers import IMMUTABLE, leaves_in
from mirror.base.dynamo import (
    DynamoCallback,
    call_under_dynamo,
    disable_and_suspend,
    is_compiled_module,
    limits_for,
    resume_dynamo,
    skip_frame,
    suspend_dynamo,
)
from mirror.base.torch_private import (
    SPLIT_CALL,
    WHOLE_CALL,
    current_autograd_node,
    current_graph_task_id,
    functions_interpreter,
    is_jit_tracing,
    top_saved_tensors_hooks,
    transforms_of,
)
from mirror.errors import MirrorError, StrategyError
from mirror.execution.replicas import Replicas
from mirror.execution.run import (
    Replica,
    current,
    is_recomputing,
    push_context,
    recomputing,
    refuse_within_another,
    renaming,
    save_context,
)
from mirror.execution.runner import Runner
from mirror.replica.exactness.local_losses import warn_if_mixing
from mirror.replica.layers.unsplit_layers import (
    LAYERS,
    call_with_sequences,
    is_sequence_first,
    renormalize_everywhere,
    renormalizes,
)
from mirror.replica.modules.metric_calls import is_metric, merge_call_joined
from mirror.replica.modules.module_owner import Interceptor, MirroredModules, ReplayedCalls
from mirror.replica.modules.per_replica_values import PerReplicaAttribute
from mirror.replica.modules.verified_calls import MOST_KINDS, VerifiedCall
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.replica.params.replicated_param import ReplicaParameter
from mirror.replica.scatter_gather.gather import join_outputs
from mirror.replica.scatter_gather.mutations import take_changes
from mirror.replica.scatter_gather.scatter import (
    ReplicaArgs,
    SplitPlan,
    describe_split,
    must_move,
    sizes_of_parts,
)
from mirror.threads.user_frames import add_note, find_remedy, warn_user

_LOSS: Any = nn.MSELoss.__base__  # the base class of torch's losses: their calls are not split

# Makes a replica's call, given its id: it may record effects of the call, and return more.
Each = Callable[[int, "partial[Any]"], Any]


class CallInterceptor(Interceptor):
    """The calls of one mirrored module: split, or run as they are.

    Args:
        compiled: the module's call after its or the strategy's ``compile``; replicas call it.

    Attributes:
        own: the replicas' values of the module's attributes. See [Note: Own attributes].
        is_checkpointed: whether a whole call may be recomputed in backward.
        is_checked: whether the outputs of a call were checked for a forward that mixes examples.
        varying: the positions of numbers among the outputs that depend on the part.
        verified: the kinds of calls that were compared with one device.
        weight_lists: of a recurrent layer, by replica. See [Note: Flat weights].
        writes_inputs: whether forward writes to tensors among its arguments, as a trial has shown.
    """

    __slots__ = (
        "compiled",
        "has_sequences",
        "has_warned_of_lists",
        "is_checked",
        "is_checkpointed",
        "is_metric",
        "is_plain",
        "own",
        "renormalizes",
        "varying",
        "verified",
        "weight_lists",
        "writes_inputs",
    )

    def __init__(
        self,
        module: nn.Module,
        recorder: MirroredModules,
        compiled: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(module, recorder)
        self.compiled = compiled
        self.renormalizes = renormalizes(module)
        self.has_sequences = isinstance(module, LAYERS)
        self.is_metric = is_metric(module)
        is_special = self.renormalizes or self.has_sequences or self.is_metric
        self.is_plain = not (is_special or isinstance(module, LazyModuleMixin))
        self.own: dict[str, PerReplicaAttribute] = {}
        self.verified, self.varying = set[Any](), set[int]()
        self.weight_lists: dict[int, dict[str, list[Any]]] = {}
        self.is_checkpointed = self.is_checked = self.has_warned_of_lists = False
        self.writes_inputs = False

    @skip_frame
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        try:
            holder = sys._getframe(1).f_locals["self"]  # of Module.__call__
        except KeyError:
            holder = module
        if holder is not module and self._is_copied_into(holder):
            return getattr(holder, WHOLE_CALL)(*args, **kwargs)
        assert module is not None
        replica = current.replica
        if replica is None or replica.replicas is not self.replicas:
            return self._call_outside(module, args, kwargs)
        if self.is_checkpointed and is_recomputing(replica):
            return self._recompute_whole(module, args, kwargs)
        if not self.is_plain:
            return self._call_inside(module, replica, args, kwargs)
        if self.compiled is not None:
            return self.compiled(*args, **kwargs)
        return getattr(module, WHOLE_CALL)(*args, **kwargs)

    def _is_copied_into(self, holder: Any) -> bool:
        """Whether another module holds this interceptor."""
        is_module = isinstance(holder, nn.Module)
        return is_module and holder.__dict__.get(SPLIT_CALL) is self

    # Copies and pickles of a module are ordinary modules, also if its class has a __getstate__ or
    # __deepcopy__ that takes the whole __dict__: an ordinary module has None in this entry.

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(None), ()

    def _call_inside(self, module: Any, replica: Replica, args: Any, kwargs: Any) -> Any:
        """Calls a module that is not plain, on a replica."""
        if isinstance(module, LazyModuleMixin):
            self.recorder.initialize(module, replica, args, kwargs)
        if self.has_sequences:
            call = self.compiled or getattr(module, WHOLE_CALL)
            return call_with_sequences(replica, module, call, args, kwargs)
        if self.compiled is not None and not self.renormalizes:
            return self.compiled(*args, **kwargs)
        if self.is_metric:
            return merge_call_joined(replica, module, getattr(module, WHOLE_CALL), args, kwargs)
        if self.renormalizes:
            renormalize_everywhere(module, replica, args[0] if args else kwargs["input"])
        return getattr(module, WHOLE_CALL)(*args, **kwargs)

    def _recompute_whole(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Makes the whole call again, in the backward pass of one replica's custom function."""
        before = save_context()
        try:
            push_context(self.replicas.strategy, None)
            return self._call_outside(module, args, kwargs)
        finally:
            current.replica, current.strategy, current.below = before

    @disable_and_suspend
    def _call_outside(
        self, module: nn.Module, args: Any, kwargs: Any, each: Each | None = None
    ) -> Any:
        dynamo_callback = suspend_dynamo()
        try:
            whole: Callable[..., Any] = self.compiled or getattr(module, WHOLE_CALL)
            if current.in_whole_call:
                return whole(*args, **kwargs)
            if current.replica is not None and torch.is_grad_enabled():
                refuse_within_another(self.replicas, f"a {type(module).__name__}")
            recomputed = None
            if current_graph_task_id() != -1:
                recomputed = replica_of_backward(self.replicas)
            if recomputed is None or self.is_checkpointed:
                if top_saved_tensors_hooks() is not None:  # activation checkpointing's, maybe
                    self.is_checkpointed = True
                return self._split(module, args, kwargs, whole, dynamo_callback, each)
            before = save_context()
            try:
                replica = recomputing(self.replicas, recomputed)
                push_context(self.replicas.strategy, replica)
                with renaming(replica):
                    return whole(*args, **kwargs)
            finally:
                current.replica, current.strategy, current.below = before
        finally:
            resume_dynamo(dynamo_callback)

    def _split(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        whole: Callable[..., Any],
        dynamo_callback: DynamoCallback,
        each: Each | None,
    ) -> Any:
        """Calls the module in the cross-replica context, on all replicas.

        Tensors that share the first dimension of the first one are split, everything else goes to
        every replica; see [Note: Arguments that forward changes]. Four kinds of calls run on the
        first replica alone: of torch's losses (a loss need not be a mean over examples); of a
        module without variables; without batched tensors; and of a module with its batch
        dimension elsewhere (an ``nn.LSTM`` without ``batch_first``).

        Args:
            whole: calls the module without splitting.
            dynamo_callback: the calling thread's. See [Note: Compiled calls].
            each: makes the calls of the replicas, if the call is split.

        Raises:
            BatchError: an argument is a PackedSequence, which cannot be split along its data.
            StrategyError: an argument is an iterator, or was changed in ways that cannot be
                joined; or torch.func differentiates by parameters with several workers.
        """
        modules, replicas = self.recorder, self.replicas
        runner = modules.runner
        # Tracing, export and torch.func follow this thread through one plain module.
        if (
            is_jit_tracing()
            or torch.compiler.is_exporting()
            or functions_interpreter() is not None
        ):
            if replicas.workers.is_multi_process:
                _refuse_own_gradients(module, args, kwargs)
            return getattr(module, WHOLE_CALL)(*args, **kwargs)
        if modules.pending.modules or modules.pending.unmade:
            modules.mirror_recorded()
        if not replicas.mirrors:
            if isinstance(module, LazyModuleMixin):
                self.recorder.initialize(module, None, args, kwargs)
            return _call_whole(
                runner, args, kwargs, partial(_call_with_dynamo, dynamo_callback, whole)
            )
        # 1. Plan how the arguments are split.
        leaves: Sequence[Any] = args
        sizes: Sequence[int] | None = None
        if self._splits(module):
            if kwargs or len(args) != 1 or type(args[0]) is not Tensor:  # not the usual call
                leaves = list(leaves_in((args, kwargs)))
            sizes = sizes_of_parts(replicas.num_replicas, leaves)
        if sizes is None:
            return self._call_unsplit(module, args, kwargs, whole, dynamo_callback)
        verified = None
        if modules.verify != "off" and each is None and sizes[1]:
            # Inline, and without a call in Python, since each call of a module does it. Parts of
            # one example are a kind of their own: ``squeeze()`` takes their dimension.
            kind: tuple[Any, ...] = (module.training, torch.is_grad_enabled())
            kind += (sizes[0] != sizes[-1], sizes[-1] < 2)
            for value in args:
                kind += (type(value),)
                if type(value) is Tensor:
                    kind += (value.dtype, value.ndim)
                elif type(value) is dict:
                    kind += tuple(value)
            for name in kwargs:
                kind += (name, type(kwargs[name]))
                if type(kwargs[name]) is Tensor:
                    kind += (kwargs[name].dtype, kwargs[name].ndim)
            if kind not in self.verified:
                verified = self._begin_to_verify(module, kind, args, kwargs, sizes)
        if each is None and replicas.num_replicas == 1 and _are_whole(runner, args, kwargs):
            return _call_lone(runner, module, args, kwargs, dynamo_callback, sizes)
        split = SplitPlan(sizes, replicas.mesh, sum(sizes), runner.copies, self.writes_inputs)
        if runner.copies is not None:
            split.pin(leaves)
        parts: dict[int, ReplicaArgs] = {}
        names = _positional_names(module) if args[1:] else ()

        # A class's own __call__ has been called already, and has called this one.
        entry: Any = module
        if type(module).__call__ is not nn.Module.__call__:
            entry = MethodType(nn.Module.__call__, module)

        # 2. Call the module on every replica.
        def call(replica_id: int) -> Any:
            replica = current.replica
            assert replica is not None
            replica.run.is_split = True
            if replica_id not in parts:  # else ``replay`` has made it, and has returned None
                parts[replica_id] = ReplicaArgs(split, replica_id, args, kwargs, names)
            part = parts[replica_id]
            if each is not None:
                own = partial(call_under_dynamo, dynamo_callback, entry, part.args, part.kwargs)
                return each(replica_id, own)
            if dynamo_callback:
                return call_under_dynamo(dynamo_callback, entry, part.args, part.kwargs)
            return entry(*part.args, **part.kwargs)

        replay, is_plain = None, self.is_plain and each is None and not dynamo_callback
        if isinstance(self.compiled, ReplayedCalls) and is_plain and runner.replays_in_caller:
            make_part = partial(ReplicaArgs, split, args=args, kwargs=kwargs, names=names)
            replay = partial(self.compiled.replay, parts=parts, make_part=make_part)
        try:
            with limits_for(replicas.num_replicas):
                run = runner.run(call, split.active, weights=sizes, replay=replay)
            if sizes[0] != sizes[-1] and not self.is_checked and torch.is_grad_enabled():
                self.is_checked = warn_if_mixing(module, run.results, sizes)
            if (lists := parts[split.active[0]].unsplit) and not self.has_warned_of_lists:
                self.has_warned_of_lists = len(split.active) > 1
                if self.has_warned_of_lists:
                    _warn_of_list(module, lists[0])
            # 3. Gather the outputs, and what forward has changed in its arguments.
            own = list(map(parts.__getitem__, run.results))
            joined = join_outputs(
                runner, run.results, sizes, own, module, self.varying, verified is not None
            )
            take_changes(runner, own, list(run.results), args, kwargs)
        except Exception as error:
            _note_sizes(error, module, split, args, kwargs)
            raise
        finally:
            if runner.copies is not None:
                split.finish()
        if verified is not None:
            varying = verified.varying_numbers(joined)
            if not varying <= self.varying:
                self.varying |= varying
                joined = join_outputs(runner, run.results, sizes, own, module, self.varying, True)
            verified.compare(joined, raises=modules.verify == "error")
        return joined

    def _begin_to_verify(
        self,
        module: nn.Module,
        kind: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sizes: Sequence[int],
    ) -> VerifiedCall | None:
        """Returns the trial of a split call; ``None`` if there is nothing to compare with."""
        if len(self.verified) >= MOST_KINDS:
            return None
        if any(isinstance(one, LazyModuleMixin) for one in module.modules()):
            return None  # this call makes their tensors; the next one is compared
        self.verified.add(kind)
        is_dynamos = self.compiled is not None and not isinstance(self.compiled, ReplayedCalls)
        if is_dynamos or any(map(is_compiled_module, module.modules())):
            return None  # the whole batch would be compiled as well

        def call(replica: Replica, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self.is_plain:
                return self._call_inside(module, replica, args, kwargs)
            return getattr(module, WHOLE_CALL)(*args, **kwargs)

        verified = VerifiedCall(self.recorder.runner, module, args, kwargs, sizes, call)
        has_begun = verified.begin()
        self.writes_inputs |= verified.writes_inputs
        return verified if has_begun else None

    def _splits(self, module: nn.Module) -> bool:
        """Whether a call of the module is split if its arguments are: it must hold variables."""
        if self.has_sequences and is_sequence_first(module):
            return False
        if self.is_metric or isinstance(module, _LOSS):
            return False
        # As in parameters() and buffers(), but most calls find one at the first look.
        modules, seen = [module], set[nn.Module]()
        for one in modules:
            if one in seen:
                continue
            seen.add(one)
            for tensors in (one._parameters, one._buffers):
                for tensor in tensors.values():
                    if isinstance(tensor, MirroredTensor):
                        return True
                    if tensor is not None and is_lazy(tensor):
                        return True
            for child in one._modules.values():
                if child is not None:
                    modules.append(child)
        return False

    def _call_unsplit(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        whole: Callable[..., Any],
        dynamo_callback: DynamoCallback,
    ) -> Any:
        """Calls the module on the first replica alone."""
        runner, replicas = self.recorder.runner, self.replicas
        runner.prepare("a call of a mirrored module")
        if any(is_lazy(tensor) for tensor in chain(module.parameters(), module.buffers())):
            # It gets its parameters now, and is mirrored at its next use.
            self.recorder.record(module)
        elif replicas.has_parameter_device and next(module.parameters(), None) is not None:
            # That device has no buffers, and the arguments do not go there.
            def call_first(*args: Any, **kwargs: Any) -> Any:
                call = partial(call_under_dynamo, dynamo_callback, module, args, kwargs)
                return runner.run(lambda replica_id: call(), (0,)).results[0]

            return _call_whole(runner, args, kwargs, call_first)
        current.in_whole_call = True
        try:
            return _call_whole(runner, args, kwargs, whole)
        finally:
            current.in_whole_call = False


def _warn_of_list(module: nn.Module, entries: Sequence[Any]) -> None:
    kind, number = type(entries).__name__, len(entries)
    warn_user(
        f"a {kind} of {number} entries, as many as the examples of the batch, went whole to every "
        f"replica in this call of {type(module).__name__}: only tensors and arrays are split. If "
        "it has an entry for each example, a replica pairs its examples with the entries of "
        "others; pass numpy.fromiter(entries, dtype=object), which is split, or a tensor with "
        "the examples first"
    )


def replica_of_backward(replicas: Replicas) -> int | None:
    """Returns the replica of the graph that this thread's backward pass is in, if any."""
    nodes: deque[Any] = deque([current_autograd_node()])
    seen = set(nodes)
    while nodes:
        node = nodes.popleft()
        variable = getattr(node, "variable", None)
        if isinstance(variable, ReplicaParameter) and variable.variable.replicas is replicas:
            return variable.replica_id
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return None


def _are_whole(runner: Runner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the only replica may use a call's arguments themselves: plain tensors, numbers."""
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
    dynamo_callback: DynamoCallback,
    sizes: Sequence[int],
) -> Any:
    """Calls a module on the only replica of one of several workers.

    It gets the caller's own objects, so that changes of these need no joining.
    """

    def call(replica_id: int) -> Any:
        replica = current.replica
        assert replica is not None
        replica.run.is_split = True
        return call_under_dynamo(dynamo_callback, module, args, kwargs)

    try:
        run = runner.run(call, (0,), weights=sizes)
        result = run.results[0]
        if type(result) is Tensor and result.shape[:1] == (sizes[0],):
            return result
        split = SplitPlan(sizes, runner.replicas.mesh, sizes[0])
        return join_outputs(runner, run.results, sizes, [ReplicaArgs(split, 0)], module)
    except Exception as error:
        split = SplitPlan(sizes, runner.replicas.mesh, sizes[0])
        _note_sizes(error, module, split, args, kwargs)
        raise


def _call_whole(
    runner: Runner, args: tuple[Any, ...], kwargs: dict[str, Any], whole: Callable[..., Any]
) -> Any:
    """Calls a module on the first replica, with its arguments moved there."""
    if not must_move((args, kwargs), runner.replicas.mesh.replicas[0]):
        return whole(*args, **kwargs)
    split = SplitPlan([1], runner.replicas.mesh, None, runner.copies)
    split.pin(leaves_in((args, kwargs)))
    try:
        part = ReplicaArgs(split, 0, args, kwargs)
        result = whole(*part.args, **part.kwargs)
    finally:
        split.finish()
    take_changes(runner, [part], [0], args, kwargs)
    return result


def _call_with_dynamo(
    dynamo_callback: DynamoCallback, whole: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Calls a module of the only replica, compiled if the caller's code is."""
    resume_dynamo(dynamo_callback)
    return whole(*args, **kwargs)


def _note_sizes(
    error: Exception, module: nn.Module, split: SplitPlan, args: tuple[Any, ...], kwargs: Any
) -> None:
    """Adds to an error in a split call how the call was split, if it may come from that.

    Errors of mirror have their own remedies. A layout that an operation lacks, memory that is
    used up, and the errors of ``find_remedy`` are not mended by another split.
    """
    others = (MirrorError, NotImplementedError, torch.OutOfMemoryError)
    if isinstance(error, others) or find_remedy(error):
        return
    add_note(
        error,
        f"this call of {type(module).__name__} was split over {len(split.active)} replicas by the "
        f"first dimension, {split.num_examples}: {describe_split(split, args, kwargs)}. If "
        "something was split that holds no examples, give it another first dimension (x[None]) or "
        "make it in forward; to split by hand, call the module inside strategy.run",
    )


def _positional_names(module: nn.Module) -> Sequence[str]:
    """Returns the names of forward's positional parameters; none if it is not in Python."""
    code = getattr(type(module).forward, "__code__", None)
    return () if code is None else code.co_varnames[1 : code.co_argcount]


def _refuse_own_gradients(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Raises StrategyError if torch.func differentiates by the parameters of a module.

    Its transforms end in C, where no other worker's gradient can be added. Gradients of single
    examples under ``vmap``, and by inputs, need no other worker.
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
