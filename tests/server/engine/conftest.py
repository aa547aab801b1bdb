"""The engines that the suite of the protocol runs on, and an actor that stands for many tests."""

import pytest

from mirror.server.engine.handshake import new_key
from mirror.server.engine.node_agents import AgentEngine, NodeAgent
from mirror.server.engine.process_engine import make_engine

ECHO = "tests.server.engine.roles:Echo"


SLOW = [pytest.param(name, marks=[pytest.mark.slow]) for name in ("agents", "ray")]


class LocalAgents(AgentEngine):
    """Starts a node agent on this machine for each actor."""

    def __init__(self):
        self.key = new_key()
        super().__init__({}, self.key)
        self.agents = []

    def start(self, name, role, init):
        self.agents.append(NodeAgent("127.0.0.1", 0, self.key, [role]))
        self._addresses[name] = "127.0.0.1", self.agents[-1].port
        return super().start(name, role, init)

    def close(self):
        super().close()
        for agent in self.agents:
            agent.close()


@pytest.fixture(scope="session", params=["process", *SLOW])
def engine(request):
    if request.param == "ray":
        pytest.importorskip("ray")
    with LocalAgents() if request.param == "agents" else make_engine(request.param) as engine:
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
