"""Actors of Ray, on a cluster or on this machine."""

from mirror.errors import BackendError

try:
    import ray  # noqa: F401
except ImportError:
    raise BackendError("engine='ray' needs Ray: pip install 'mirror-strategy[ray]'") from None
