"""What happens before what: vector clocks of streams and the host, and the memory they touch.

[Note: What happens before what]
Each stream is an agent, which does its work in order, and the host is one more (its threads as
one: how they wait for each other is not the subject). An agent knows how far it has seen each of
the others: a stream knows what the host knew when the work was enqueued, what a stream waits for
by an event it knows then, and the host knows what it has synchronized with.

Two accesses to the same bytes, one of which writes, must be in that order: the later one's agent
knows the earlier one. So it does not matter what was faster this time. Memory that was freed on
the host goes at once to the next allocation on the stream that it was allocated on, and must
not be in use then by another stream, unless ``record_stream`` has told the allocator of that one.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class StreamError(AssertionError):
    """Work on streams is not ordered as its memory demands."""


class Agent:
    """A stream or the host.

    Attributes:
        now: how many pieces of work it has done.
        seen: how many of each other's it knows to be done.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.now = 0
        self.seen: dict[Agent, int] = {}

    def snapshot(self) -> dict[Agent, int]:
        """Returns the clock of every agent as this one knows it; an event records it."""
        return {**self.seen, self: self.now}

    def learn(self, clock: dict[Agent, int]) -> None:
        """Goes on after what the clock says."""
        for agent, tick in clock.items():
            if agent is not self and tick > self.seen.get(agent, 0):
                self.seen[agent] = tick

    def knows(self, clock: dict[Agent, int]) -> bool:
        """Whether all that the clock says is known to be done."""
        return all(
            agent is self or tick <= self.seen.get(agent, 0) for agent, tick in clock.items()
        )

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Access:
    """One agent's use of some bytes."""

    agent: Agent
    tick: int
    begin: int
    end: int
    writes: bool
    what: str

    def is_known_to(self, agent: Agent) -> bool:
        return agent is self.agent or self.tick <= agent.seen.get(self.agent, 0)

    def __str__(self) -> str:
        return f"{'written' if self.writes else 'read'} by {self.what} on {self.agent}"


@dataclass(eq=False, slots=True)
class Memory:
    """A piece of memory.

    Attributes:
        home: the stream that it was allocated on; ``None`` for the host's.
        recorded: the streams that the allocator has been told of.
    """

    name: str
    home: Agent | None
    recorded: set[Agent] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)


class Order:
    """The clocks of all agents, and the errors found.

    Attributes:
        violations: what was not ordered, in words.
    """

    def __init__(self) -> None:
        self.host = Agent("the host")
        self.violations: list[str] = []
        self._freed: dict[Agent, list[Memory]] = {}

    def enqueue(self, agent: Agent) -> None:
        """Begins a piece of work, which comes after all that the host knows."""
        if agent is not self.host:
            agent.learn(self.host.snapshot())
        agent.now += 1

    def access(
        self, agent: Agent, memory: Memory, begin: int, end: int, *, writes: bool, what: str
    ) -> None:
        """Has the piece of work just begun read or write bytes ``begin`` to ``end``."""
        if begin >= end:
            return
        this = Access(agent, agent.now, begin, end, writes, what)
        kept = []
        for old in memory.accesses:
            overlaps = old.begin < end and begin < old.end
            is_known = old.is_known_to(agent)
            if overlaps and (writes or old.writes) and not is_known:
                self.violations.append(f"{memory.name} is {this}, unordered with {old}")
            is_covered = begin <= old.begin and old.end <= end
            # An agent ordered after this one is ordered after those, too.
            if not (is_covered and is_known and (writes or not old.writes)):
                kept.append(old)
        memory.accesses = [*kept, this]

    def free(self, memory: Memory) -> None:
        """Gives memory back to the stream that it was allocated on."""
        if memory.home is not None and memory.accesses:
            self._freed.setdefault(memory.home, []).append(memory)

    def allocate(self, home: Agent) -> None:
        """Gives memory freed on a stream to the next allocation on that stream."""
        for memory in self._freed.pop(home, []):
            for old in memory.accesses:
                if old.agent not in memory.recorded and not old.is_known_to(home):
                    self.violations.append(
                        f"{memory.name} was freed and given out again on {home}, while it is {old}"
                        "; record_stream was not called"
                    )

    def check(self) -> None:
        """Raises StreamError if something has gone wrong."""
        if self.violations:
            different = list(dict.fromkeys(self.violations))
            shown = "\n  ".join(different[:8])
            raise StreamError(f"{len(different)} violations of stream order:\n  {shown}")
