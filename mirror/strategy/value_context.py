"""ValueContext: the replica that a value is made for."""

from __future__ import annotations


class ValueContext:
    """What ``distribute_values_from_function`` tells its function.

    Attributes:
        replica_id_in_sync_group: the replica that the value is for.
        num_replicas_in_sync: the number of replicas.
    """

    def __init__(self, replica_id_in_sync_group: int, num_replicas_in_sync: int) -> None:
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync

    def __repr__(self) -> str:
        place = f"replica {self.replica_id_in_sync_group} of {self.num_replicas_in_sync}"
        return f"{type(self).__name__}({place})"
