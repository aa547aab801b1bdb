"""The engines that the suite of the protocol runs on, and an actor that stands for many tests."""

import pytest

from mirror.server.engine.agent_engine import AgentEngine
from mirror.server.engine.handshake import new_key
from mirror.server.engine.make_engine import make_engine
from mirror.server.engine.node_agent import NodeAgent

ECHO = "tests.server.engine.roles:Echo"


SLOW = [pytest.param(name, marks=[pytest.mark.slow]) for name in ("seats", "ray")]


class SeatsHere(AgentEngine):
    """Puts a seat for each actor on this machine."""

    def __init__(self):
        super().__init__({}, new_key())
        self.seats = []

    def start(self, name, role, init):
        self.seats.append(NodeAgent("127.0.0.1", 0, self._key))
        self._addresses[name] = "127.0.0.1", self.seats[-1].port
        return super().start(name, role, init)

    def close(self):
        super().close()
        for seat in self.seats:
            seat.close()


@pytest.fixture(scope="session", params=["process", *SLOW])
def engine(request):
    if request.param == "ray":
        pytest.importorskip("ray")
    with SeatsHere() if request.param == "seats" else make_engine(request.param) as engine:
        yield engine


@pytest.fixture(scope="session")
def lasting(engine):
    return engine.start("lasting", ECHO, {"number": 3})


@pytest.fixture
def actor(lasting):
    """An actor in its first state; restarted only if a test has ended it."""
    if not lasting.alive:
        lasting.restart()
    lasting.call("forget").result()
    return lasting
