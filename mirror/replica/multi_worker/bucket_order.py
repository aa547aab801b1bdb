"""The sequence: in which order gradients travel between workers, and in which buckets.

[Note: Agreed buckets]
Workers must sum the same buckets in the same order: gloo ends the process when sizes differ. So
the sequence of all variables that are trained is agreed on, by one exchange before the first pass
that needs it: worker 0's order of arrival, and for what its pass did not reach, the order in which
variables were registered, from the last. It is cut into buckets, of one dtype each.

    every reduction reduces the whole sequence, in order, whatever has arrived on a worker: what is
    absent is zeros; tails tell what is absent everywhere
    a bucket is launched as soon as it is complete and its turn has come, beside the pass, by the
    hook of its last variable, or else when somebody looks
    the last bucket waits for the look: it tells whether gradients are left, of another pass

When a variable comes that the sequence has not, or is trained again, all agree anew, which all
find by themselves as they run one program. A variable that is frozen keeps its place, and sends
zeros, until it has been so for some reductions: a GAN freezes a network for half a step. One that
is gone keeps it, too: when it goes is a matter of the garbage collection, on each worker.

Variables whose gradients are sparse are in no bucket: see ``sum_sparse``. They stay so in every
later order: a dense gradient cannot be added to a sparse state of an optimizer. A sparse gradient
of a variable in a bucket (an embedding that the first passes did not reach) is set aside, the tail
says so, and all agree on an order without it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence

import torch

from mirror.comm.packing import plan_packs
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.replica.collectives.packed_reducer import Reducer
from mirror.replica.gradients.ready_grads import local_grad
from mirror.replica.multi_worker.worker_bucket import WorkerBucket, real_dtype
from mirror.replica.params.replicated_param import ReplicatedParam

_PATIENCE = 3  # reductions that a frozen variable is kept for


class BucketOrder:
    """What all workers have agreed on.

    Attributes:
        buckets: at least one, even if it has a tail alone.
        sparse: variables whose gradients are sparse; ``None`` for one that is gone.
        changes: of the watch, those that are taken into account.
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

    def forget(self, variable: ReplicatedParam) -> None:
        """Lets go of a variable that is gone. A garbage collection may come here: no lock."""
        self._known.discard(variable)
        for bucket in self.buckets:
            bucket.forget(variable)
        if variable in self.sparse:
            self.sparse[self.sparse.index(variable)] = None

    def fits(self, trained: Sequence[ReplicatedParam], changes: int) -> bool:
        """Whether it serves for the variables that are trained now; asked after changes."""
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
) -> tuple[list[ReplicatedParam], list[ReplicatedParam]]:
    """Agrees with all workers on the order of what is trained; returns it, and what is sparse.

    Args:
        trained: all that are, in the order in which they were registered.
        arrived: those with gradients, in the order of arrival.
        weight: this worker's, of the first pass of all: becomes part of the reference.
        known_sparse: those of the order before, whose gradients may have been reduced by now.
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
    said = workers.exchange(
        f"the order of the gradients of {len(trained)} parameters",
        digest,
        lambda: json.dumps([order, sparse, weight.hex()]).encode(),
    )
    every = [json.loads(one) for one in said]
    if workers.reference is None:
        total = sum(float.fromhex(theirs) for _, _, theirs in every)
        workers.reference = total or float(workers.num_replicas)
    apart = {i for _, theirs, _ in every for i in theirs}
    agreed = [i for i in every[0][0] if i not in apart]
    return [trained[i] for i in agreed], [trained[i] for i in sorted(apart)]


def _is_sparse(variable: ReplicatedParam) -> bool:
    grads = (local_grad(copy) for copy in variable.copies)
    return any(grad is not None and grad.is_sparse for grad in grads)
