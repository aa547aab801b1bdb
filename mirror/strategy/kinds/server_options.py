"""Options of parameter servers: how many, and by which engine."""

from __future__ import annotations

from typing import Any

from mirror.errors import in_words

_JOBS = ("chief", "worker", "ps")


def counts_of(cluster: Any) -> tuple[int, int]:
    """Returns how many servers and workers a cluster has."""
    from mirror.cluster.spec import ClusterSpec  # which most programs do without

    spec = cluster.cluster_spec() if hasattr(cluster, "cluster_spec") else cluster
    spec = ClusterSpec(spec)
    unknown = [job for job in spec.jobs if job not in _JOBS]
    if unknown:
        raise ValueError(
            f"a cluster of parameter servers has the jobs {', '.join(map(repr, _JOBS))}; got "
            f"{unknown[0]!r}"
        )
    counts = {job: spec.num_tasks(job) if job in spec.jobs else 0 for job in _JOBS}
    if counts["chief"] > 1:
        raise ValueError(f"a cluster has at most one chief; got {counts['chief']}")
    for job in ("ps", "worker"):
        if counts[job] < 1:
            raise ValueError(f"a cluster of parameter servers has at least one {job}; got none")
    return counts["ps"], counts["worker"]


def at_least(name: str, value: object, least: int = 1) -> int:
    """Returns an integer; ValueError for what is none, or too small."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer from {least} on, got {in_words(value)}")
    return value


def check_engine(engine: object) -> None:
    """Raises ValueError for what is neither an engine nor the name of one."""
    names = ("auto", "process", "ray")
    if engine not in names and not hasattr(engine, "start"):
        raise ValueError(
            f"engine must be one of {', '.join(map(repr, names))}, or an engine; got "
            f"{in_words(engine)}"
        )
