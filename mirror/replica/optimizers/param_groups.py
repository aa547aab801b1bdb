"""Parameter groups of optimizers: parameters per replica, and the options that replicas share.

Replicas step with copies of the options, which must be equal on all replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mirror.base.torch_private import WithoutSubclass
from mirror.errors import StrategyError
from mirror.execution.replicas import Replicas
from mirror.replica.params.replicated_param import ReplicaParameter, ReplicatedParam
from mirror.replica.params.shared_memory import address_of, lie_alike
from mirror.replica.params.torch_function import MirroredParameter
from mirror.threads.schedule import count_own_hooks


class ParamGroupsView:
    """The contents of an optimizer's groups at its last step; they seldom change.

    Attributes:
        variables: the records of the mirrored parameters of all groups, in order.
        targets: per replica, the ordinary parameters that its optimizer step updates.
        sizes: the number of parameters of each group.
        are_mirrored: whether there are no other parameters.
    """

    __slots__ = (
        "_copies",
        "_lists",
        "_of_replicas",
        "are_mirrored",
        "sizes",
        "targets",
        "variables",
    )

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self._lists = [tuple(options["params"]) for options in groups]
        self._of_replicas: dict[int, list[list[Tensor]]] = {}
        held = [parameter for parameters in self._lists for parameter in parameters]
        mirrored = [p for p in held if isinstance(p, MirroredParameter)]
        self.variables: list[ReplicatedParam] = [parameter._mirrored for parameter in mirrored]
        self.targets = list(zip(*[variable.targets for variable in self.variables], strict=True))
        self._copies = list(zip(*[variable.copies for variable in self.variables], strict=True))
        self.sizes = [len(parameters) for parameters in self._lists]
        self.are_mirrored = len(mirrored) == len(held)

    def are_in(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether the groups hold the same mirrored parameters and no others; 20 ns each."""
        if not self.are_mirrored or len(groups) != len(self._lists):
            return False
        for options, known in zip(groups, self._lists, strict=True):
            held = options["params"]
            if len(held) != len(known) or not all(map(is_, held, known)):
                return False
        return True

    def follow_copies(self, active: Sequence[int]) -> list[ReplicatedParam]:
        """Has targets follow copies to which code below Python has given other memory.

        Looks at those of the first active replica: the others run the same code. Returns the
        variables that have followed.
        """
        found = []
        for variable in self.variables if self._lie_apart(active[0]) else ():
            moved = [variable.follow_leaf(variable.copies[r]) for r in active]
            if any(moved):
                found.append(variable)
        return found

    def follow_targets(self, replica_id: int) -> None:
        """Has the copies follow targets to which a step has given other data."""
        for variable in self.variables if self._lie_apart(replica_id) else ():
            variable.follow_target(replica_id)

    def _lie_apart(self, replica_id: int) -> bool:
        if not self.variables:
            return False
        copies, targets = self._copies[replica_id], self.targets[replica_id]
        with WithoutSubclass():  # halves the time; 100 ns for each parameter
            try:
                return list(map(address_of, copies)) != list(map(address_of, targets))
            except RuntimeError:  # a sparse tensor has none
                return not all(map(lie_alike, copies, targets))

    def groups_of(self, replica_id: int, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns one replica's copies of these groups, with options of its own.

        Parameters that are not mirrored belong to the first replica.
        """
        lists = self._of_replicas.get(replica_id)
        if lists is None:
            lists = [_copies_of(parameters, replica_id) for parameters in self._lists]
            self._of_replicas[replica_id] = lists
        if replica_id:
            replicas = self.variables[0].replicas if self.variables else None
            groups = [own_options(options, replicas, replica_id) for options in groups]
        return [options | {"params": [*mine]} for options, mine in zip(groups, lists, strict=True)]


def _copies_of(parameters: Iterable[Tensor], replica_id: int) -> list[Tensor]:
    return [
        state_key(p._mirrored, replica_id) if isinstance(p, MirroredParameter) else p
        for p in parameters
        if replica_id == 0 or isinstance(p, MirroredParameter)
    ]


def state_key(variable: ReplicatedParam, replica_id: int) -> nn.Parameter:
    """Returns the parameter under which a replica has optimizer state."""
    return variable.targets[replica_id] if replica_id else variable.home


def own_options(
    options: dict[str, Any], replicas: Replicas | None, replica_id: int
) -> dict[str, Any]:
    """Returns a copy of a group's options for one replica, with tensors of its own.

    A tensor on a GPU of the first replica, as a learning rate, is copied to the same place of
    this one: steps of lists compute with it on the device of the parameters.

    Args:
        replicas: those of the group's parameters; ``None`` if no parameter is mirrored.
    """

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        device = value.device
        if replicas is not None and device in replicas.mesh.replicas[0]:
            device = replicas.mesh.peers_of(device)[replica_id]
        return value.to(device, copy=True)

    return {name: copied(value) for name, value in options.items()}


def replicas_in(optimizer: Optimizer) -> Replicas | None:
    """Returns the replicas of an optimizer's parameters; ``None`` if none is mirrored.

    Raises:
        StrategyError: its parameters are of two strategies, or one replica's own.
    """
    replicas: Replicas | None = None
    for options in optimizer.param_groups:
        kinds = set(map(type, options["params"]))  # each step of a plain optimizer looks at these
        if not any(issubclass(kind, (MirroredParameter, ReplicaParameter)) for kind in kinds):
            continue
        for parameter in options["params"]:
            if isinstance(parameter, MirroredParameter):
                theirs = parameter._mirrored.replicas
                if replicas is not None and theirs is not replicas:
                    raise StrategyError(
                        "an optimizer holds parameters of two strategies; make one for each"
                    )
                replicas = theirs
            elif isinstance(parameter, ReplicaParameter):
                raise StrategyError(
                    "an optimizer made inside strategy.run holds one replica's "
                    "own parameters; make optimizers outside run"
                )
    return replicas


def find_replicas(optimizer: Optimizer) -> Replicas | None:
    """Returns the replicas of the first mirrored parameter of an optimizer, or of one it wraps.

    Every step of a scheduler or an optimizer inside ``run`` calls it, so it stops there.
    """
    for options in getattr(optimizer, "param_groups", ()):
        for parameter in options["params"]:
            if isinstance(parameter, MirroredParameter):
                return parameter._mirrored.replicas
    for inner in optimizers_in(optimizer):
        replicas = find_replicas(inner)
        if replicas is not None:
            return replicas
    return None


def optimizers_in(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yields the optimizers that an optimizer holds as attributes, because it wraps them."""
    for value in vars(optimizer).values():
        for inner in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(inner, Optimizer) and inner is not optimizer:
                yield inner


def refuse_unmirrored(optimizer: Optimizer) -> None:
    """Raises StrategyError for a parameter that is not mirrored: no gradient of it is reduced."""
    for i, options in enumerate(getattr(optimizer, "param_groups", ())):
        for parameter in options["params"]:
            if not isinstance(parameter, MirroredParameter) and parameter.requires_grad:
                raise StrategyError(
                    f"parameter group {i} has a parameter of shape {tuple(parameter.shape)} "
                    "that no mirrored module holds: its gradient would not be reduced; put it "
                    "into a mirrored module, or step outside strategy.run"
                )


class StepOnce:
    """A closure that was evaluated before the replicas merged."""

    def __init__(self, loss: Any) -> None:
        self._losses = [loss]

    def __call__(self) -> Any:
        if not self._losses:
            raise StrategyError(
                "this optimizer evaluates its closure several times, on losses that differ "
                "between replicas; call step(closure) outside strategy.run, where the closure's "
                "forward spans all replicas"
            )
        return self._losses.pop()


Options = list[dict[str, Any]]


class WithTensors(dict[str, Any]):
    """The options of a group with tensors among them, which can be changed in place.

    Attributes:
        held: the values of the tensors when the options were read.
    """

    held: Mapping[str, Any]


def options_of(optimizer: Optimizer) -> Options:
    """Returns the options of each group as they are now."""
    groups: Options = [*map(dict, getattr(optimizer, "param_groups", ()))]
    for i, options in enumerate(groups):
        if Tensor in map(type, options.values()):  # 100 ns if there is none
            groups[i] = known = WithTensors(options)
            known.held = {n: _read_count(v) for n, v in options.items() if type(v) is Tensor}
    return groups


def _read_count(tensor: Tensor) -> Any:
    """Returns the value of a CPU tensor; of other tensors, which need a wait, the version."""
    if tensor.device.type == "cpu":
        return _numbers(tensor)
    return "no count" if tensor.is_inference() else f"written to {tensor._version} times"


def _numbers(value: Any) -> Any:
    """Returns the numbers in a tensor, and anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.numel() == 1 else tuple(value.flatten().tolist())


def keep_options(groups: Sequence[dict[str, Any]], written: Options) -> None:
    """Copies the options that one replica has written to its copies of groups into the groups."""
    for options, copied in zip(groups, written, strict=True):
        for name, value in copied.items():
            if name != "params" and (name not in options or options[name] is not value):
                options[name] = value


def refuse_different(optimizer: Optimizer, seen: Mapping[int, Options], when: str) -> None:
    """Raises if a replica has read, or set, other options than the first replica.

    Raises:
        StrategyError: naming the option and the two values.
    """
    first, *others = sorted(seen)
    for r in others:
        for i, (mine, theirs) in enumerate(zip(seen[first], seen[r], strict=False)):
            is_same = [*mine] == [*theirs] and all(map(is_, mine.values(), theirs.values()))
            if is_same and type(mine) is dict:
                continue
            for name in mine.keys() | theirs.keys():
                ours, other = mine.get(name), theirs.get(name)
                if (
                    ours is other
                    and isinstance(mine, WithTensors)
                    and isinstance(theirs, WithTensors)
                ):
                    ours, other = mine.held.get(name), theirs.held.get(name)
                elif isinstance(ours, Tensor) or isinstance(other, Tensor):
                    ours, other = _numbers(ours), _numbers(other)
                if ours is not other and _is_number(ours, other) and ours != other:
                    raise StrategyError(
                        f"{name!r} of parameter group {i} of {type(optimizer).__name__} was "
                        f"{ours!r} {when} on replica {first} and {other!r} on replica {r}: the "
                        "groups are shared, so a replica that changes one changes it for all, and "
                        "replicas that each decay it do so N times; change it outside "
                        "strategy.run, or with a torch.optim.lr_scheduler"
                    )


def _is_number(*values: Any) -> bool:
    plain = (int, float, bool, str, type(None))
    return all(
        isinstance(v, plain) or (isinstance(v, tuple) and all(isinstance(x, plain) for x in v))
        for v in values
    )


_HOOKS = "_mirror_step_hooks"  # in an optimizer's __dict__; copies and pickles leave it out
StepHooks = tuple[Mapping[int, Any], ...]  # by the ids of handles


@functools.cache
def _global_step_hooks() -> StepHooks:
    """Returns torch's dicts of the hooks of all optimizers' steps, before and after a step."""
    return _dicts_of(register_optimizer_step_pre_hook, register_optimizer_step_post_hook)


def _dicts_of(*registers: Callable[..., Any]) -> StepHooks:
    handles = [register(lambda *args: None) for register in registers]
    count_own_hooks(len(handles))
    for handle in handles:
        handle.remove()
    return tuple(handle.hooks_dict_ref() for handle in handles)


def step_hooks(optimizer: Any) -> StepHooks:
    """Returns the dicts of the hooks of an optimizer's steps, before and after a step."""
    found: StepHooks | None = optimizer.__dict__.get(_HOOKS)
    if found is None:
        found = optimizer.__dict__[_HOOKS] = _dicts_of(
            optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        )
    return found


def all_step_hooks(optimizer: Any) -> StepHooks:
    """Returns the dicts of the program's hooks of all optimizers' steps, and of this one's."""
    return *_global_step_hooks(), *step_hooks(optimizer)
