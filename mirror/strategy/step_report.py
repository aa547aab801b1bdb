"""The report of a strategy: the times of the parts of a step, and advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median

from mirror.base.pictures import COLOURS, OTHER, TablePart, table_of
from mirror.base.timeline import (
    BACKWARD,
    COMPILED,
    COMPILING,
    CROSS,
    EXPOSED,
    FORWARD,
    INPUT,
    OPTIMIZER,
    OVERLAPPED,
    PROGRAMS,
    REDUCTION,
    SHARED_PROGRAMS,
    Timeline,
)
from mirror.device.gpu_waits import HostLead

# The share of the step from which a part is said to limit it.
_MUCH = 0.25

_ADVICE = {
    "input": (
        "The step waits for input: give the DataLoader more workers, raise InputOptions(prefetch=)"
        ", or do less work per example."
    ),
    "reduction": (
        "The step waits for the reduction of gradients: use larger batches, accumulate under "
        "strategy.no_sync(), or send them as CommunicationOptions(wire_dtype=torch.bfloat16)."
    ),
    "optimizer": (
        "The optimizer takes much of the step: create it with foreach=True or fused=True, or use "
        "larger batches."
    ),
    "host": (
        "Much of the step is spent outside forward, backward and optimizer: in your own code "
        "between them (logging, metrics, .item()), or in switches between replicas, which matter "
        "less with larger batches."
    ),
    "compiled host": (
        "Much of a compiled step is the host's work around its programs, which is the same for "
        "every batch: use larger batches."
    ),
    "programs": (
        "The compiled programs take the step, as they should: a faster dtype makes it faster."
    ),
    "computation": (
        "Forward and backward take the step, as they should: make them faster as on one device "
        "(a faster dtype, torch.compile, channels_last)."
    ),
    "nothing": "No step has been taken yet: a step ends with optimizer.step().",
}


_LAUNCH_LESS = (
    "Compile the step (strategy.compile), which launches it at once; create the optimizer with "
    "fused=True; use an interpreter without the GIL; or a process for each GPU "
    "(MultiWorkerMirroredStrategy)."
)


@dataclass(frozen=True)
class CompiledTimes:
    """The times of compiled steps: medians over those among the last steps, in seconds.

    Attributes:
        num_steps: the number of compiled steps among the last steps.
        own_programs: the time of each replica's programs: forward and backward.
        shared_programs: the time of programs that run once on each device: the optimizer.
        reductions: the time of reductions of gradients and other values.
        host: the time of Python in a call: checking guards, binding tensors, joining results.
        num_calls: the number of compiled calls since the strategy was created.
        num_traces: the number of times that a step was traced and compiled.
        compile_seconds: the total time of these traces and compilations.
    """

    num_steps: int
    own_programs: float
    shared_programs: float
    reductions: float
    host: float
    num_calls: int
    num_traces: int
    compile_seconds: float

    def __str__(self) -> str:
        parts = {
            "programs of replicas": self.own_programs,
            "programs of devices": self.shared_programs,
            "reductions": self.reductions,
            "host": self.host,
        }
        times = ", ".join(f"{name} {seconds * 1e3:.3f} ms" for name, seconds in parts.items())
        return (
            f"a compiled step, median of {self.num_steps}: {times}\n"
            f"{self.num_calls} compiled calls; traced and compiled {self.num_traces} times, in "
            f"{self.compile_seconds:.1f} s"
        )


@dataclass(frozen=True)
class Report:
    """Medians over the last steps, in seconds. It prints, and shows in a notebook, as a table.

    A step ends with the end of a ``run`` in which an optimizer stepped, with an optimizer step
    outside ``run``, or with a compiled step. Times are the host's: on GPUs, the time to launch
    the work, and to wait where the program waits.

    Attributes:
        num_steps: the number of steps.
        num_replicas: the number of the strategy's replicas in this process.
        step: the time of a whole step, from the end of the previous one.
        waiting_for_input: the wait for the next batch of a distributed dataset.
        forward: the time of the replicas' functions, without the parts below.
        backward: the time of backward passes, without reductions.
        waiting_for_reduction: the time of exposed reductions, and the wait for overlapped ones.
        optimizer: the time of optimizer steps.
        programs: the time of compiled steps without their reductions, see ``compiled``.
        other: the rest: code between runs, and switches between replicas.
        hidden_share: the share of the reductions' time that backward passes hid, 0 to 1; ``None``
            without reductions.
        host_seconds: per replica, the host's time for its forward, backward and optimizer.
        advice: the part that limits the step, and a remedy.
        compiled: the times of compiled steps; ``None`` if there were none.
        worker: the name of the reporting worker, such as ``"worker 1 of 2"``; ``None`` for one.
        optimizer_state: ``"replicated"`` or ``"sharded"``.
        state_bytes: the bytes of optimizer state that each replica holds now, if it is sharded.
        host_lead: on GPUs, how long they wait for the host, or it is ahead; ``None`` before the
            first sampled step, and on simulated devices.
    """

    num_steps: int
    num_replicas: int
    step: float
    waiting_for_input: float
    forward: float
    backward: float
    waiting_for_reduction: float
    optimizer: float
    programs: float
    other: float
    hidden_share: float | None
    host_seconds: tuple[float, ...]
    advice: str
    compiled: CompiledTimes | None
    worker: str | None = None
    optimizer_state: str = "replicated"
    state_bytes: tuple[int, ...] = ()
    host_lead: HostLead | None = None

    def to_dict(self) -> dict[str, object]:
        """Returns the attributes as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        def row(name: str, seconds: float) -> str:
            share = f"{seconds / self.step:6.0%}" if self.step else ""
            return f"{name:24}{seconds * 1e3:12.3f} ms{share}"

        parts = [row(name, seconds) for name, seconds, _ in self._parts()]
        return "\n".join([self._title(), row("whole step", self.step), *parts, *self._notes()])

    def _repr_html_(self) -> str:
        parts = [TablePart(*part) for part in self._parts()]
        return table_of(self._title(), self.step, parts, self._notes())

    def _title(self) -> str:
        worker = f" of {self.worker}" if self.worker else ""
        return f"a step, median of {self.num_steps}, on {self.num_replicas} replicas{worker}"

    def _parts(self) -> Iterator[tuple[str, float, str]]:
        """Yields the parts of a step: name, seconds and colour."""
        yield "waiting for input", self.waiting_for_input, COLOURS[INPUT]
        yield "forward", self.forward, COLOURS[FORWARD]
        yield "backward", self.backward, COLOURS[BACKWARD]
        yield "waiting for reduction", self.waiting_for_reduction, COLOURS[REDUCTION]
        yield "optimizer", self.optimizer, COLOURS[OPTIMIZER]
        if self.compiled is not None:
            yield "compiled steps", self.programs, COLOURS[PROGRAMS]
        yield "other", self.other, OTHER

    def _notes(self) -> list[str]:
        notes = [] if self.compiled is None else str(self.compiled).splitlines()
        if self.hidden_share is not None:
            notes.append(f"{self.hidden_share:.0%} of the reductions' time was hidden")
        if sum(self.state_bytes):
            most, mean = max(self.state_bytes), sum(self.state_bytes) / len(self.state_bytes)
            notes.append(
                f"optimizer state: {self.optimizer_state}, at most {most / 1e6:.3f} MB on a "
                f"replica, {most / mean:.2f} times the mean"
            )
        host = ", ".join(f"{seconds * 1e3:.3f}" for seconds in self.host_seconds)
        notes.append(f"host time per replica: {host} ms")
        if self.host_lead is not None:
            notes.append(_describe_lead(self.host_lead))
        return [*notes, self.advice]


def _describe_lead(lead: HostLead) -> str:
    """Says whether the host or the GPUs limit the step, and by how much."""
    wait = f"{lead.num_gpus} GPUs wait" if lead.num_gpus > 1 else "1 GPU waits"
    wait += f" {lead.waiting * 100:.0f} %"
    if lead.waiting + lead.keeping_up <= _MUCH:
        ahead = f"the host is {lead.ahead_seconds * 1e3:.3f} ms ahead at the end of a step"
        return f"the host does not limit this step: {wait}; {ahead}"
    if lead.keeping_up > _MUCH:
        wait += f", and for {lead.keeping_up * 100:.0f} % kernels end before the next launch"
    return f"the host limits this step: {wait}. {_LAUNCH_LESS}"


def make_report(timeline: Timeline, *, takes_turns: bool) -> Report:
    """Returns the report of a strategy's timeline.

    Args:
        takes_turns: whether one replica runs at a time, so that their times add up; the times of
            replicas that run at once are averaged.
    """
    num_replicas = timeline.num_replicas
    share = 1.0 if takes_turns else 1.0 / num_replicas
    rows = [_row(step, lanes, num_replicas, share) for step, lanes in timeline.steps]
    if not rows:
        rows = [_row(0.0, timeline.current_step()[1], num_replicas, share)]
    middle = {key: median(row[key] for row in rows) for key in rows[0]}
    reduced = sum(row["reduced"] for row in rows)
    hidden = sum(row["hidden"] for row in rows)
    return Report(
        num_steps=len(timeline.steps),
        num_replicas=num_replicas,
        step=middle["step"],
        waiting_for_input=middle["input"],
        forward=middle["forward"],
        backward=middle["backward"],
        waiting_for_reduction=middle["reduction"],
        optimizer=middle["optimizer"],
        programs=middle["programs"],
        other=middle["other"],
        hidden_share=hidden / reduced if reduced else None,
        host_seconds=tuple(middle[f"host {r}"] for r in range(num_replicas)),
        advice=_ADVICE[_limit(middle) if timeline.steps else "nothing"],
        compiled=_summarize_compiled(timeline),
    )


def _summarize_compiled(timeline: Timeline) -> CompiledTimes | None:
    counted = timeline.compiled
    crosses = [lanes[CROSS] for _, lanes in timeline.steps]
    found = [lane for lane in crosses if lane[PROGRAMS] + lane[SHARED_PROGRAMS]]
    if not found:
        return None

    def median_seconds(kind: str) -> float:
        return median(lane[kind] for lane in found)

    return CompiledTimes(
        num_steps=len(found),
        own_programs=median_seconds(PROGRAMS),
        shared_programs=median_seconds(SHARED_PROGRAMS),
        reductions=median_seconds(REDUCTION),
        host=median_seconds(COMPILED),
        num_calls=counted.calls,
        num_traces=counted.traces,
        compile_seconds=counted.seconds,
    )


def _row(
    step: float, lanes: list[dict[str, float]], num_replicas: int, share: float
) -> dict[str, float]:
    replicas, cross, overlapped = lanes[:num_replicas], lanes[CROSS], lanes[OVERLAPPED]

    def seconds_of(kind: str) -> float:
        return cross[kind] + share * sum(lane[kind] for lane in replicas)

    exposed = seconds_of(EXPOSED)
    times = {
        "input": seconds_of(INPUT),
        "forward": seconds_of(FORWARD),
        "backward": seconds_of(BACKWARD),
        "reduction": seconds_of(REDUCTION) + exposed,
        "optimizer": seconds_of(OPTIMIZER),
        "programs": sum(map(seconds_of, (PROGRAMS, SHARED_PROGRAMS, COMPILED, COMPILING))),
    }
    hidden = max(0.0, overlapped[REDUCTION] - exposed)
    host = {
        f"host {r}": sum(lane[kind] for kind in (FORWARD, BACKWARD, OPTIMIZER))
        for r, lane in enumerate(replicas)
    }
    return {
        **times,
        **host,
        "compiled host": seconds_of(COMPILED),
        "step": step,
        "other": max(0.0, step - sum(times.values())),
        "hidden": hidden,
        "reduced": overlapped[REDUCTION] + seconds_of(REDUCTION),
    }


def _limit(middle: Mapping[str, float]) -> str:
    limits = {
        "input": middle["input"],
        "reduction": middle["reduction"],
        "optimizer": middle["optimizer"],
        "host": middle["other"],
        "compiled host": middle["compiled host"],
    }
    name = max(limits, key=lambda key: limits[key])
    if limits[name] > _MUCH * middle["step"]:
        return name
    return "programs" if middle["programs"] else "computation"
