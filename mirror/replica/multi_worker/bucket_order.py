"""BucketOrder: the order of buckets on which all workers have agreed.

Workers must sum the same buckets in the same order: gloo ends the process when sizes differ. So
before the first pass that needs it, one exchange agrees on an order of all trained variables:
worker 0's order of arrival, then, in reverse order of registration, the variables that its pass
did not reach. The order is cut into buckets of one dtype each.

    A reduction always reduces all buckets in order. Absent gradients are sent as zeros; the
    trailers show which gradients are absent on every worker.
    A bucket is launched during the pass, by the hook of its last variable, once it is complete
    and all buckets before it are launched. Otherwise it is launched when a gradient is used.
    The last bucket is launched when a gradient is used: its trailer says whether gradients of
    another pass remain.

If a variable is missing in the order, the workers agree on a new one. They all detect that
themselves, since they run the same program. A frozen variable keeps its slot, and sends zeros, for
some reductions: a GAN freezes a network for half a step. A freed variable keeps its slot too,
because the time of the garbage collection differs between workers.

Variables with sparse gradients are in no bucket, see ``sum_sparse``. They stay sparse in all later
orders, since a dense gradient cannot be added to an optimizer's sparse state. If a sparse
gradient comes for a variable in a bucket (an embedding that the first passes did not reach), it is
set aside, the trailer says so, and the workers agree on an order without that variable.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence

import torch

from mirror.comm.packing import plan_packs
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.replica.gradients.ready_grads import Reducer, local_grad
from mirror.replica.multi_worker.worker_bucket import WorkerBucket, real_dtype
from mirror.replica.params.replicated_param import ReplicatedParam

_PATIENCE = 3  # reductions that a frozen variable is kept for


class BucketOrder:
    """The order on which all workers have agreed.

    Attributes:
        buckets: at least one; without variables it contains only a trailer.
        sparse: the variables with sparse gradients; ``None`` for a freed one.
        changes: the value of ``GradTracker.changes`` for which the order is known to fit.
    """

    def __init__(
        self,
        variables: Sequence[ReplicatedParam],
        sparse: Sequence[ReplicatedParam],
        changes: int,
        reducer: Reducer,
        devices: Sequence[torch.device],
    ) -> None:
        first = [variable.targets[0] for variable in variables]
        dtypes = list(map(real_dtype, first))
        packs = plan_packs([target.nbytes for target in first], dtypes, reducer.bytes_per_pack)
        members = [[variables[i] for i in pack] for pack in packs] or [[]]
        self.buckets = [
            WorkerBucket(each, reducer.wire_dtype, devices, on_host=reducer.is_on_host)
            for each in members
        ]
        self.sparse: list[ReplicatedParam | None] = list(sparse)
        self._known = {*variables, *sparse}
        self.changes = changes
        self._num_narrower = 0
        self._memory = variables[0].memory if variables else None
        self._num_moves = 0 if self._memory is None else self._memory.num_moves

    def matches(self) -> bool:
        """Whether parameters still have the dtypes, shapes and strides of their buckets."""
        if self._memory is None or self._num_moves == self._memory.num_moves:
            return True
        if not all(bucket.matches() for bucket in self.buckets):
            return False
        self._num_moves = self._memory.num_moves
        return True

    def forget(self, variable: ReplicatedParam) -> None:
        """Drops a variable that was freed. Takes no lock: a garbage collection may call it."""
        self._known.discard(variable)
        for bucket in self.buckets:
            bucket.forget(variable)
        if variable in self.sparse:
            self.sparse[self.sparse.index(variable)] = None

    def fits(self, trained: Sequence[ReplicatedParam], changes: int) -> bool:
        """Whether the order can be used for the variables that are trained after ``changes``."""
        if not self._known.issuperset(trained):
            return False
        if len(trained) == len(self._known):
            self.changes, self._num_narrower = changes, 0
            return True
        self._num_narrower += 1
        return self._num_narrower <= _PATIENCE


def agree(
    workers: LocalWorkerGroup,
    trained: Sequence[ReplicatedParam],
    arrived: Sequence[ReplicatedParam],
    weight: float,
    known_sparse: Collection[ReplicatedParam | None] = (),
) -> tuple[list[ReplicatedParam], list[ReplicatedParam], float]:
    """Agrees with all workers on the order of the trained variables.

    Args:
        trained: all trained variables, in the order of registration.
        arrived: the variables with gradients, in the order of arrival.
        weight: this worker's weight.
        known_sparse: the sparse variables of the previous order.

    Returns:
        The variables with dense gradients, in the agreed order; those with sparse ones; and the
        sum of all workers' weights, or the number of replicas if that is 0.
    """
    position = {variable: i for i, variable in enumerate(trained)}
    order = [position[variable] for variable in arrived if variable in position]
    order += sorted({*range(len(trained))} - {*order}, reverse=True)
    sparse = [i for v, i in position.items() if v in known_sparse or _is_sparse(v)]
    described = [
        (v.name, tuple(t.shape), str(t.dtype), t.stride())
        for v, t in ((v, v.targets[0]) for v in trained)
    ]
    digest = hashlib.blake2b(repr(described).encode(), digest_size=8).hexdigest()
    messages = workers.exchange(
        f"the order of the gradients of {len(trained)} parameters",
        digest,
        lambda: json.dumps([order, sparse, weight.hex()]).encode(),
    )
    every = [json.loads(message) for message in messages]
    total = sum(float.fromhex(theirs) for _, _, theirs in every) or float(workers.num_replicas)
    all_sparse = {i for _, theirs, _ in every for i in theirs}
    dense = [i for i in every[0][0] if i not in all_sparse]
    return [trained[i] for i in dense], [trained[i] for i in sorted(all_sparse)], total


def _is_sparse(variable: ReplicatedParam) -> bool:
    grads = (local_grad(copy) for copy in variable.copies)
    return any(grad is not None and grad.is_sparse for grad in grads)
