"""SlicedParams: the slices of an optimizer's parameters, as tensors that replicas step.

A slice is stepped on one replica of one worker: see ``gradients/slice_plan.py``. There it is

    a whole parameter    ``targets[r]`` itself, with its gradient
    a part of one        an ordinary flat parameter on a part of the storage of ``targets[r]``

Its gradient is the scattered one, or the same part of ``targets[r].grad``: see
[Note: Scattered gradients] in ``gradients/grad_scatter.py``.

A slice of another worker has a stand-in, on the first replica, with the gradient that it has
there: nobody steps it here.

After a step every replica gets the slices that the others have updated: see
``gradients/slice_exchange.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mirror.comm.packing import have_same_strides
from mirror.execution.replicas import Replicas
from mirror.replica.gradients.slice_exchange import SliceExchange, flat_like, view_flat
from mirror.replica.gradients.slice_plan import ParamSlice
from mirror.replica.optimizers.param_groups import ParamGroupsView
from mirror.replica.params.replicated_param import ReplicatedParam
from mirror.replica.params.shared_memory import is_dense

_MAX_EXCHANGES = 8  # that are kept, one for each set of parameters with a gradient


class SlicedParams:
    """The slices of an optimizer's parameters, on every replica.

    Args:
        slices: their plan; the indices are positions in ``parameters.variables``.

    Attributes:
        parameters: the contents of the optimizer's groups that were planned.
        slices: in the order of the parameters.
        holders: for each slice the replica of this worker that steps it; ``None`` if it is
            another worker's.
        stepped: for each slice the parameter that its replica's optimizer step updates.
        of_variable: the positions of each variable's slices.
    """

    def __init__(
        self, parameters: ParamGroupsView, slices: Sequence[ParamSlice], replicas: Replicas
    ) -> None:
        self.parameters, self._replicas = parameters, replicas
        self.slices = sorted(slices)
        variables = parameters.variables
        self._moves = [variable.num_moves for variable in variables]
        self.of_variable: dict[ReplicatedParam, list[int]] = {v: [] for v in variables}
        workers = replicas.workers
        here = range(workers.replica_offset, workers.replica_offset + replicas.num_replicas)
        self.holders = [
            one.replica_id - here.start if one.replica_id in here else None for one in self.slices
        ]
        self.stepped: list[nn.Parameter] = []
        self._views: list[list[Tensor]] = [[] for _ in replicas.devices]
        self._cut: list[int] = []
        self._whole: list[int] = []
        for position, one in enumerate(self.slices):
            variable = variables[one.param_index]
            self.of_variable[variable].append(position)
            is_cut = one.stop - one.start < variable.targets[0].numel()
            for views, target in zip(self._views, variable.targets, strict=True):
                view = view_flat(target.detach()) if is_cuttable(variable) else target.detach()
                views.append(view[one.start : one.stop] if is_cut else view)
            holder = self.holders[position] or 0
            stepped = variable.targets[holder]
            if is_cut:
                self._cut.append(position)
                view = self._views[holder][position]
                stepped = nn.Parameter(view, requires_grad=stepped.requires_grad)
            else:
                self._whole.append(position)
            self.stepped.append(stepped)
        # Of whole parameters; ``map`` over these makes no call for each.
        self._shapes = [self.stepped[position].shape for position in self._whole]
        self._strides = [_grad_strides(self.stepped[position]) for position in self._whole]
        self._is_lent = False
        self._lists = [self._params_of(r) for r in range(replicas.num_replicas)]
        self._exchanges: dict[tuple[int, ...], SliceExchange] = {}

    def are_valid(self, parameters: ParamGroupsView) -> bool:
        """Whether these are the slices of the optimizer's groups, on today's storages."""
        if parameters is not self.parameters:
            return False
        return [variable.num_moves for variable in parameters.variables] == self._moves

    def cut_variables(self) -> list[ReplicatedParam]:
        """Returns the variables of which a replica steps a part only."""
        indices = dict.fromkeys(self.slices[position].param_index for position in self._cut)
        return [self.parameters.variables[index] for index in indices]

    def variables_of(self, positions: Sequence[int]) -> list[ReplicatedParam]:
        """Returns the variables of the slices at these positions."""
        indices = dict.fromkeys([self.slices[position].param_index for position in positions])
        return [self.parameters.variables[index] for index in indices]

    def params_of(self, replica_id: int) -> list[list[nn.Parameter]]:
        """Returns what one replica steps, for each group; do not change the lists."""
        return self._lists[replica_id]

    def _params_of(self, replica_id: int) -> list[list[nn.Parameter]]:
        lists: list[list[nn.Parameter]] = []
        position, first = 0, 0
        for size in self.parameters.sizes:
            mine: list[nn.Parameter] = []
            while position < len(self.slices) and self.slices[position].param_index < first + size:
                if self.holders[position] == replica_id:
                    mine.append(self.stepped[position])
                position += 1
            first += size
            lists.append(mine)
        return lists

    def set_gradients(self, scattered: Sequence[Tensor | None] | None) -> tuple[int, ...]:
        """Gives the slices their gradients; returns the positions of slices that have one.

        Args:
            scattered: the scattered gradient of every slice; ``None`` if the gradients are those
                of ``targets``.
        """
        self._is_lent = scattered is not None
        if scattered is not None:
            for position in self._cut:
                self.stepped[position].grad = scattered[position]
            grads = [scattered[position] for position in self._whole]
            present = [grad for grad in grads if grad is not None]
            if len(present) < len(grads):
                for position, shape, stride in zip(
                    self._whole, self._shapes, self._strides, strict=True
                ):
                    grad = scattered[position]
                    if grad is not None:
                        grad = grad.as_strided(shape, stride)
                    self.stepped[position].grad = grad
            else:
                shaped = list(map(Tensor.as_strided, present, self._shapes, self._strides))
                for position, grad in zip(self._whole, shaped, strict=True):
                    self.stepped[position].grad = grad
        else:
            for position in self._cut:
                one = self.slices[position]
                target = self.parameters.targets[self.holders[position] or 0][one.param_index]
                grad = target.grad
                if grad is not None:
                    grad = flat_like(grad, target)[one.start : one.stop]
                self.stepped[position].grad = grad
        have_one = [i for i, stepped in enumerate(self.stepped) if stepped.grad is not None]
        return tuple(have_one)

    def grad_versions(self) -> list[int | None]:
        """Returns the versions of the slices' gradients."""
        grads = [stepped.grad for stepped in self.stepped]
        return [None if grad is None else grad._version for grad in grads]

    def drop_gradients(self, versions: Sequence[int | None], positions: Sequence[int]) -> None:
        """Takes the gradients from the slices, after a step.

        A step that has written into gradients (by lists, with ``nesterov``) has done so on one
        replica: the others get that part of ``targets[r].grad``. Scattered gradients have it.

        Args:
            versions: the versions of the gradients before the step.
            positions: the slices that were stepped.

        Raises:
            DivergenceError: another worker has stepped other slices.
        """
        is_written = not self._is_lent and versions != self.grad_versions()
        if self._replicas.workers.is_multi_process:
            written = self._replicas.workers.exchange(
                f"the step of {len(positions)} slices", positions, lambda: b"%d" % is_written
            )
            is_written = b"1" in written
        if is_written:
            self._share_written_gradients()
        for position in self._cut:
            self.stepped[position].grad = None
        if self._is_lent:
            for position in self._whole:
                self.stepped[position].grad = None
        self._is_lent = False

    @torch.no_grad()
    def _share_written_gradients(self) -> None:
        positions = [i for i, stepped in enumerate(self.stepped) if stepped.grad is not None]
        views: list[list[Tensor]] = [[] for _ in self._views]
        for views_of_one, targets in zip(views, self.parameters.targets, strict=True):
            for one in self.slices:
                target = targets[one.param_index]
                grad = target.grad
                if grad is None or grad.layout is not torch.strided:
                    views_of_one.append(target)  # not exchanged, or as it is
                elif grad.stride() == target.stride():
                    views_of_one.append(view_flat(grad.detach())[one.start : one.stop])
                else:
                    views_of_one.append(grad.detach())
        flat_ones = [i for i in positions if all(own[i].dim() == 1 for own in views)]
        SliceExchange(self._replicas, self.slices, views, flat_ones).all_gather()

    @torch.no_grad()
    def all_gather(self, positions: tuple[int, ...]) -> None:
        """Copies these slices from the replicas that have stepped them to all others."""
        exchange = self._exchanges.get(positions)
        if exchange is None:
            if len(self._exchanges) >= _MAX_EXCHANGES:
                self._exchanges.clear()
            exchange = SliceExchange(self._replicas, self.slices, self._views, positions)
            self._exchanges[positions] = exchange
        exchange.all_gather()


def _grad_strides(parameter: Tensor) -> tuple[int, ...]:
    """Returns the strides that autograd gives a gradient: a parameter's, if it has no gaps."""
    if parameter.layout is not torch.strided or is_dense(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


def is_cuttable(variable: ReplicatedParam) -> bool:
    """Whether equal positions in memory are equal elements on all replicas, without gaps."""
    if any(target.layout is not torch.strided for target in variable.targets):
        return False
    return have_same_strides(variable.targets)
