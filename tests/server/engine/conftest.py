"""The engines that the suite of the protocol runs on, and an actor that stands for many tests."""

import pytest

from mirror.server.engine.choose import make_engine

ECHO = "tests.server.engine.roles:Echo"


@pytest.fixture(scope="session", params=["process", pytest.param("ray", marks=[pytest.mark.slow])])
def engine(request):
    if request.param == "ray":
        pytest.importorskip("ray")
    with make_engine(request.param) as engine:
        yield engine


@pytest.fixture(scope="session")
def lasting(engine):
    return engine.start("lasting", ECHO, {"number": 3})


@pytest.fixture
def actor(lasting):
    """An actor in its first state; started anew only if a test has ended it."""
    if not lasting.alive:
        lasting.restart()
    lasting.call("forget").result()
    return lasting
