"""Four simulated devices of jax, where the extra [tpu] is installed."""

import pytest

from mirror_tpu.torchax_library import unavailable_reason


@pytest.fixture(scope="session")
def four():
    """Makes a TPUStrategy of four simulated devices."""
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    from mirror import TPUStrategy

    def make(number=4):
        with pytest.warns(UserWarning, match="never run on a TPU"):
            return TPUStrategy(["cpu"] * number)

    make()  # jax has as many devices as its first user asks for
    return make


@pytest.fixture
def tpus(four):
    with four() as strategy:
        yield strategy
