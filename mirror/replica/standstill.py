"""The errors of replicas that do not go on together."""

from __future__ import annotations

from mirror.errors import CollectiveTimeoutError, DivergenceError


def divergence(where: str) -> DivergenceError:
    """Returns the error for replicas that do not stand at one merge point.

    Args:
        where: a line for each replica, on where it stands.
    """
    return DivergenceError(
        "all replicas must reach the same collectives in the same order, with the same shapes "
        f"and dtypes; they did not:\n{where}\n"
        "make the control flow around the collective the same on every replica"
    )


def timeout(timeout_seconds: float | None, where: str) -> CollectiveTimeoutError:
    """Returns the error for replicas of which none has moved for too long."""
    return CollectiveTimeoutError(
        f"no replica moved for timeout_seconds={timeout_seconds}:\n{where}\n"
        "raise the timeout in CommunicationOptions, or find what keeps the replica"
    )
